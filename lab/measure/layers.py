"""Layer clock: times of a model's layers, by hooks during training."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils.hooks import RemovableHandle

from lab.measure.hold import hold
from lab.measure.marks import Mark, mark, seconds
from lab.measure.modules import in_order, layers_of, owners_of, sizes_of


@dataclass
class Pass:
    """Marks of one forward and backward.

    Attributes:
        forward: layers with their begin, in order.
        middle: end of the model's forward.
        backward: layers with the moments when their gradients were ready.
    """

    begin: Mark
    forward: list[tuple[str, Mark]] = field(default_factory=list)
    middle: Mark | None = None
    backward: list[tuple[str, Mark]] = field(default_factory=list)


class LayerClock:
    """A clock for each layer, that is each module with its own parameters, in every pass.

    All times add up to the whole pass. In forward a layer lasts until the next one begins, so it
    includes the activations and pooling after it. In backward it lasts from the last gradient of
    the layer above to its own; the last layer includes the loss.

    On a GPU the stream is held until the host has queued a whole pass, so a layer lasts as long as
    its kernels.

    It is a context manager: hooks live between `__enter__` and `__exit__`.

    Args:
        model: on its device.
        device: see lab.measure.clock.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model, self._device = model, device
        self._modules = layers_of(model)
        self.parameters = sizes_of(self._modules)
        self._passes: list[Pass] = []
        self._hooks: list[RemovableHandle] = []
        # Host times: begin of a pass, its last gradient, and the shortest pass.
        self._begun_s, self._noted_s, self._launch_s = 0.0, math.inf, math.inf

    def __enter__(self) -> Self:
        self._hooks = [
            self._model.register_forward_pre_hook(self._begin),
            self._model.register_forward_hook(self._turn),
        ]
        for name, module in self._modules.items():
            self._hooks.append(module.register_forward_pre_hook(self._note("forward", name)))
        for parameter, name in owners_of(self._modules).items():
            note = self._note("backward", name)
            self._hooks.append(parameter.register_post_accumulate_grad_hook(note))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def times_ms(self, warmup: int) -> tuple[list[str], NDArray[np.float64]]:
        """Return the layers in the order of forward, and how long each took in every pass.

        Args:
            warmup: number of first passes to leave out.

        Returns:
            names, and milliseconds [passes, forward and backward, layers].
        """
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        order = in_order((name for name, _ in self._passes[0].forward), self._modules)
        position = {name: index for index, name in enumerate(order)}
        return order, np.array([_milliseconds(one, position) for one in self._passes[warmup:]])

    def _begin(self, *_: Any) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # or the host runs further ahead at each pass
            self._launch_s = min(self._launch_s, self._noted_s - self._begun_s)
            hold(self._launch_s)
        self._begun_s = time.perf_counter()
        self._passes.append(Pass(mark(self._device)))

    def _turn(self, *_: Any) -> None:
        self._passes[-1].middle = mark(self._device)

    def _note(self, way: str, name: str) -> Callable[..., None]:
        def note(*_: Any) -> None:
            if way == "forward" and self._passes[-1].middle is not None:
                return  # backward computes the layer again
            getattr(self._passes[-1], way).append((name, mark(self._device)))
            self._noted_s = time.perf_counter()

        return note


def _milliseconds(one: Pass, position: dict[str, int]) -> np.ndarray:
    """Return forward and backward milliseconds of each layer in one pass: float64 [2, layers]."""
    assert one.middle is not None
    times = np.zeros((2, len(position)))
    _, *later = [moment for _, moment in one.forward]
    begins, ends = [one.begin, *later], [*later, one.middle]
    for (name, _), begin, end in zip(one.forward, begins, ends, strict=True):
        times[0, position[name]] += 1000 * seconds(begin, end)
    before = one.middle
    for name, moment in one.backward:
        times[1, position[name]] += 1000 * seconds(before, moment)
        before = moment
    return times
