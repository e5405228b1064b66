"""Layer clock: times of a model's layers, by hooks during training; and of a GPU's kernels."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from lab.measure.clock import Pass, mark, seconds

WAYS = ("forward", "backward")
CYCLES_PER_S = 3e9  # the fastest GPUs' clocks; a slower one holds longer
SLACK = 1.5
LONGEST_S = 0.1
OPTIMIZER = "Optimizer.step"  # torch's name for every optimizer's step
Values = NDArray[np.float64]


class LayerClock:
    """A clock for each layer, that is each module with its own parameters, in every pass.

    All times add up to the whole pass (see lab.measure.clock.Pass.spans).

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
        self._open = ExitStack()
        # Host times: begin of a pass, its last gradient, and the shortest pass.
        self._begun_s, self._noted_s, self._launch_s = 0.0, math.inf, math.inf

    def __enter__(self) -> Self:
        self._open.callback(self._model.register_forward_pre_hook(self._begin).remove)
        self._open.enter_context(marked_layers(self._model, self._device, lambda: self._passes))
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
        first = self._passes[0]
        order = in_order((name for name, _ in first.forward), self._modules)
        position = {name: index for index, name in enumerate(order)}
        return order, np.array([_milliseconds(one, position) for one in self._passes[warmup:]])

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


@contextmanager
def marked_layers(
    model: nn.Module, device: torch.device, passes: Callable[[], list[Pass]]
) -> Iterator[None]:
    """Mark the layers of `model`, by hooks, in every pass while the context lasts.

    Args:
        passes: returns the list to which passes are added now.
    """

    def begin(*_: Any) -> None:
        passes().append(Pass(mark(device)))

    def turn(*_: Any) -> None:
        passes()[-1].middle = mark(device)

    def forward(name: str, *_: Any) -> None:
        if passes()[-1].middle is None:  # else backward computes the layer again
            passes()[-1].forward.append((name, mark(device)))

    def backward(name: str, *_: Any) -> None:
        passes()[-1].backward.append((name, mark(device)))

    layers = layers_of(model)
    hooks = [model.register_forward_pre_hook(begin)]
    for name, module in layers.items():
        hooks.append(module.register_forward_pre_hook(partial(forward, name)))
    for parameter, name in owners_of(layers).items():
        hooks.append(parameter.register_post_accumulate_grad_hook(partial(backward, name)))
    hooks.append(model.register_forward_hook(turn))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


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


def hold(launch_s: float) -> None:
    """Keep the current stream busy for a little more than `launch_s`, at most LONGEST_S.

    Kernels queued meanwhile then run without gaps, so their time excludes the host's launches.
    """
    sleep = getattr(torch.cuda, "_sleep", None)  # private: a later torch may lack it
    if sleep is None:
        warnings.warn("torch.cuda._sleep is gone: times may hold launches", stacklevel=2)
        return
    sleep(int(min(SLACK * launch_s, LONGEST_S) * CYCLES_PER_S))


@contextmanager
def profiled() -> Iterator[profile]:
    """Profile the GPU's kernels; feed the result to `kernels_ms(profiler.key_averages(), ...)`."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        yield profiler
        torch.cuda.synchronize()


def kernels_ms(averages: Iterable[Any], num_steps: int) -> float:
    """Return the milliseconds of kernels per step, without the optimizer's.

    Args:
        averages: the profiler's events, summed by name.
        num_steps: number of profiled steps.
    """
    whole_us = optimizer_us = 0.0
    for each in averages:
        if each.device_type == DeviceType.CUDA and not each.is_user_annotation:
            whole_us += each.self_device_time_total
        elif each.device_type == DeviceType.CPU and each.key.startswith(OPTIMIZER):
            optimizer_us += each.device_time_total
    return (whole_us - optimizer_us) / num_steps / 1000


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
