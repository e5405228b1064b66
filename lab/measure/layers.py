"""Layer clock: times of a model's layers, by hooks during training."""

from __future__ import annotations

import math
import time
from contextlib import ExitStack
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from lab.measure.hold import hold
from lab.measure.layer_marks import LayerMarks, Pass
from lab.measure.marks import seconds
from lab.measure.modules import in_order, layers_of, owners_of, sizes_of

WAYS = ("forward", "backward")


class LayerClock:
    """A clock for each layer, that is each module with its own parameters, in every pass.

    All times add up to the whole pass (see lab.measure.layer_marks.Pass.spans).

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
        self._marks = LayerMarks(device)
        self._open = ExitStack()
        # Host times: begin of a pass, its last gradient, and the shortest pass.
        self._begun_s, self._noted_s, self._launch_s = 0.0, math.inf, math.inf

    def __enter__(self) -> Self:
        self._open.callback(self._model.register_forward_pre_hook(self._begin).remove)
        self._open.enter_context(self._marks.on(self._model))
        for parameter in owners_of(self._modules):
            hook = parameter.register_post_accumulate_grad_hook(self._note)
            self._open.callback(hook.remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def times_ms(self, warmup: int) -> tuple[list[str], NDArray[np.float64]]:
        """Return the layers in the order of forward, and how long each took in every pass.

        Args:
            warmup: number of first passes to leave out.

        Returns:
            names, and milliseconds [passes, WAYS, layers].
        """
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        passes = self._marks.passes
        order = in_order((name for name, _ in passes[0].forward), self._modules)
        position = {name: index for index, name in enumerate(order)}
        return order, np.array([_milliseconds(one, position) for one in passes[warmup:]])

    def _begin(self, *_: Any) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # or the host runs further ahead at each pass
            self._launch_s = min(self._launch_s, self._noted_s - self._begun_s)
            hold(self._launch_s)
        self._begun_s = time.perf_counter()

    def _note(self, _parameter: torch.Tensor) -> None:
        self._noted_s = time.perf_counter()


def _milliseconds(one: Pass, position: dict[str, int]) -> np.ndarray:
    """Return forward and backward milliseconds of each layer in one pass: float64 [2, layers]."""
    times = np.zeros((2, len(position)))
    for way, name, begin, end in one.spans():
        times[WAYS.index(way), position[name]] += 1000 * seconds(begin, end)
    return times
