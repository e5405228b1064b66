"""Backward data, backward weights and the bias of a layer, apart from the model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

ROUNDS, BIAS_ROUNDS = 5, 15
TOGETHER = 1.3  # both alone take so much longer than both at once: one kernel computes them


@dataclass(frozen=True)
class Call:
    """A call of a layer in a step.

    Attributes:
        needs_data: the step needs the gradient of its input.
        autocast: dtype in which the step computes products; None: that of its tensors.
    """

    layer: nn.Module
    inputs: Tensor
    needs_data: bool
    autocast: torch.dtype | None = None

    def again(self, inputs: Tensor) -> Any:
        """Call the layer as the step does."""
        device, enabled = inputs.device.type, self.autocast is not None
        with torch.autocast(device, dtype=self.autocast, enabled=enabled):
            return self.layer(inputs)


@contextmanager
def noting_calls(model: nn.Module, calls: dict[str, Call]) -> Iterator[None]:
    """Note the last call of each layer of one input that has weights, and no layers inside."""
    hooks = [
        module.register_forward_pre_hook(partial(_note, calls, name or "model"))
        for name, module in model.named_modules()
        if not any(True for _ in module.children())
        and any(weight.requires_grad for weight in module.parameters())
    ]
    yield
    for hook in hooks:
        hook.remove()


def share_of_data(call: Call, synchronize: Callable[[], None]) -> float | None:
    """Return backward data's share of a layer's backward; None: they cannot be told apart.

    Both gradients are computed alone and together, in turns; medians decide.
    """
    if not call.needs_data:
        return 0.0
    if not call.inputs.is_floating_point():
        return None
    inputs = call.inputs.detach().clone().requires_grad_()
    weights = [weight for weight in call.layer.parameters() if weight.requires_grad]
    with torch.enable_grad():
        output = call.again(inputs)
    if not isinstance(output, Tensor):
        return None
    gradient = torch.randn_like(output)
    wanted: list[list[Tensor]] = [[inputs], [*weights], [inputs, *weights]]
    calls = [partial(torch.autograd.grad, output, of, gradient, retain_graph=True) for of in wanted]
    times = _in_turns(calls, ROUNDS, synchronize)
    data, of_weights, both = np.median(times, axis=0)
    if data + of_weights > TOGETHER * both:
        return None
    return float(data / (data + of_weights))


def seconds_of_bias(call: Call, synchronize: Callable[[], None]) -> NDArray[np.float64] | None:
    """Return what a product's bias takes as operations of their own; None: it has no bias.

    Libraries compute both with the product, so its time does not show them.

    Returns:
        Seconds of adding it to the output in place, and of summing the output's gradient, shape
        (BIAS_ROUNDS, 2).
    """
    layer = call.layer
    weight, bias = (getattr(layer, name, None) for name in ("weight", "bias"))
    if weight is None or weight.dim() < 2 or not isinstance(bias, Tensor):
        return None
    with torch.no_grad():
        output = call.again(call.inputs)
        channel = output.dim() - 1 if isinstance(layer, nn.Linear) else 1
        others = [dim for dim in range(output.dim()) if dim != channel]
        added = bias.to(output.dtype).view(
            [1 if dim in others else -1 for dim in range(output.dim())]
        )
        calls = [partial(output.add_, added), partial(torch.sum, output, others)]
        return _in_turns(calls, BIAS_ROUNDS, synchronize)


def _in_turns(
    calls: Sequence[Callable[[], object]], rounds: int, synchronize: Callable[[], None]
) -> NDArray[np.float64]:
    """Return the seconds of each call, shape (rounds, calls), after a round that prepares."""
    times = np.empty((rounds + 1, len(calls)))
    for row in times:
        for place, call in enumerate(calls):
            synchronize()
            began = time.perf_counter()
            call()
            synchronize()
            row[place] = time.perf_counter() - began
    return times[1:]


def _note(calls: dict[str, Call], name: str, layer: nn.Module, inputs: tuple[Any, ...]) -> None:
    if len(inputs) == 1 and isinstance(inputs[0], Tensor):
        (tensor,), device = inputs, inputs[0].device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        calls[name] = Call(layer, tensor.detach(), tensor.requires_grad, dtype)
