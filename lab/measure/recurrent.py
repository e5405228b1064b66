"""The products of a recurrent layer, all steps at once, for counting."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

State = Tensor | tuple[Tensor, Tensor]


def count_at_once(model: nn.Module) -> None:
    """Replace forward of every LSTM, GRU and RNN in `model` by the same products without a loop.

    Step by step, a sequence takes as many operations as it has steps, and seconds to count; fused
    kernels have no formula. The outputs are meaningless and have the shapes of the layer's own;
    element-wise operations among them do not count, as a fused kernel's move no memory.
    """
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.forward = MethodType(_at_once, module)


def _at_once(layer: nn.RNNBase, inputs: Tensor, _state: Any = None) -> tuple[Tensor, State]:
    """Return outputs [..., directions * width] and the state [layers * directions, ..., width]."""
    width = layer.proj_size or layer.hidden_size
    names = ("", "_reverse") if layer.bidirectional else ("",)
    for number in range(layer.num_layers):
        outputs = [_direction(layer, inputs, f"_l{number}{name}", width) for name in names]
        inputs = torch.cat(outputs, dim=-1) if len(outputs) > 1 else outputs[0]
    time = 1 if layer.batch_first and inputs.dim() == 3 else 0
    last = inputs.select(time, -1).unflatten(-1, (len(names), width)).movedim(-2, 0)
    state = torch.cat([last] * layer.num_layers)
    if isinstance(layer, nn.LSTM):
        return inputs, (state, state.new_zeros(*state.shape[:-1], layer.hidden_size))
    return inputs, state


def _direction(layer: nn.RNNBase, inputs: Tensor, suffix: str, width: int) -> Tensor:
    weight: dict[str, Any] = {name: getattr(layer, f"{name}{suffix}", None) for name in PARAMETERS}
    gates = linear(inputs, weight["weight_ih"], weight["bias_ih"])
    gates = gates + linear(gates[..., :width], weight["weight_hh"], weight["bias_hh"])
    outputs = gates[..., : layer.hidden_size].tanh()
    return linear(outputs, weight["weight_hr"]) if layer.proj_size else outputs


PARAMETERS = ("weight_ih", "bias_ih", "weight_hh", "bias_hh", "weight_hr")
