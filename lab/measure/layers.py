"""Layer clock: times of a model's layers, by hooks during training."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from lab.measure.marks import Mark, hold, mark, seconds

WAYS = ("forward", "backward")
Values = NDArray[np.float64]


class LayerClock:
    """A clock for each layer, that is each module with its own parameters, in every pass.

    All times add up to the whole pass (see lab.measure.layers.Pass.spans).

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


@dataclass
class Pass:
    """Marks of one forward and backward.

    Attributes:
        forward: layers with their begin, in order.
        middle: end of the model's forward.
        backward: layers with the moments when their gradients were ready.
    """

    begin: Mark
    forward: list[tuple[str, Mark]] = field(default_factory=list[tuple[str, Mark]])
    middle: Mark | None = None
    backward: list[tuple[str, Mark]] = field(default_factory=list[tuple[str, Mark]])

    def spans(self) -> Iterator[tuple[str, str, Mark, Mark]]:
        """Yield pass, layer, begin and end.

        In forward a layer lasts until the next one begins, so it includes the activations and
        pooling after it. In backward it lasts from the last gradient of the layer above to its
        own; the last layer includes the loss.
        """
        assert self.middle is not None
        ends = [*(begin for _, begin in self.forward[1:]), self.middle]
        begins = [self.begin, *ends]
        for (name, _), begin, end in zip(self.forward, begins, ends, strict=False):
            yield "forward", name, begin, end
        before = self.middle
        for name, ready in self.backward:
            yield "backward", name, before, ready
            before = ready


class LayerMarks:
    """Hooks that mark the layers of a model, that is each module with its own parameters.

    Attributes:
        passes: where marks go; whoever empties it may put another list in its place.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.passes: list[Pass] = []

    @contextmanager
    def on(self, model: nn.Module) -> Iterator[None]:
        """Mark every pass of a model while the context lasts."""
        layers = layers_of(model)
        hooks = [model.register_forward_pre_hook(self._begin)]
        for name, module in layers.items():
            hooks.append(module.register_forward_pre_hook(self._forward(name)))
        for parameter, name in owners_of(layers).items():
            hooks.append(parameter.register_post_accumulate_grad_hook(self._backward(name)))
        hooks.append(model.register_forward_hook(self._turn))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _begin(self, *_: Any) -> None:
        self.passes.append(Pass(mark(self._device)))

    def _turn(self, *_: Any) -> None:
        self.passes[-1].middle = mark(self._device)

    def _forward(self, name: str) -> Callable[..., None]:
        def note(*_: Any) -> None:
            if self.passes[-1].middle is None:  # else backward computes the layer again
                self.passes[-1].forward.append((name, mark(self._device)))

        return note

    def _backward(self, name: str) -> Callable[..., None]:
        def note(*_: Any) -> None:
            self.passes[-1].backward.append((name, mark(self._device)))

        return note


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules with parameters of their own, by name, in the order of registration."""
    return {
        name.replace(".", "_") or "model": module
        for name, module in model.named_modules()
        if any(True for _ in module.parameters(recurse=False))
    }


def owners_of(layers: dict[str, nn.Module]) -> dict[nn.Parameter, str]:
    """Return the layer of each parameter that is trained; a shared one belongs to its first."""
    owners: dict[nn.Parameter, str] = {}
    for name, module in layers.items():
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad:
                owners.setdefault(parameter, name)
    return owners


def sizes_of(layers: dict[str, nn.Module]) -> dict[str, int]:
    """Return the number of values of each layer's gradient."""
    sizes = dict.fromkeys(layers, 0)
    for parameter, name in owners_of(layers).items():
        sizes[name] += parameter.numel()
    return sizes


def in_order(called: Iterable[str], registered: Iterable[str]) -> list[str]:
    """Return all layers in the order of their first call.

    A layer that is never called, because another module uses its parameters, follows the one that
    is registered before it.
    """
    order = list(dict.fromkeys(called))
    before: str | None = None
    for name in registered:
        if name not in order:
            order.insert(order.index(before) + 1 if before else 0, name)
        before = name
    return order


def fixed_and_per_sample(batches: Sequence[int], times: Sequence[Values]) -> tuple[Values, Values]:
    """Fit time = fixed + per_sample · batch by least squares, both of at least 0.

    Errors are relative to the times: noise grows with a time, so in absolute terms the largest
    batch would decide alone, and the fixed part is what the smallest ones show. Through two batches
    the line passes exactly, unless a part would be below 0; the other then fits alone.

    Args:
        batches: at least two, all different.
        times: for each batch an array of any shape, the same for all.

    Returns:
        fixed, per_sample: of that shape, in the unit of the times; 0 where a time is.
    """
    t = np.stack([np.asarray(each, dtype=np.float64) for each in times], axis=-1)
    b = np.array(batches, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        s, sb, sbb = ((b**power / t**2).sum(axis=-1) for power in (0, 1, 2))
        st, sbt = (1 / t).sum(axis=-1), (b / t).sum(axis=-1)
        determinant = s * sbb - sb**2
        fixed = (sbb * st - sb * sbt) / determinant
        per_sample = (s * sbt - sb * st) / determinant
        growing, constant = fixed < 0, per_sample < 0
        fixed = np.where(growing, 0.0, np.where(constant, st / s, fixed))
        per_sample = np.where(constant, 0.0, np.where(growing, sbt / sbb, per_sample))
    return np.nan_to_num(fixed), np.nan_to_num(per_sample)
