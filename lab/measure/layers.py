"""Marks of a model's layers, by hooks during training; and times of a GPU's kernels."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from lab.measure.clock import PassMarks, mark

CYCLES_PER_S = 3e9  # the fastest GPUs' clocks; a slower one holds longer
SLACK = 1.5
LONGEST_S = 0.1
OPTIMIZER = "Optimizer.step"  # torch's name for every optimizer's step


@contextmanager
def marked_layers(
    model: nn.Module, device: torch.device, passes: Callable[[], list[PassMarks]]
) -> Iterator[None]:
    """Mark the layers of `model`, by hooks, in every pass while the context lasts.

    Args:
        passes: returns the list to which passes are added now.
    """

    def begin(*_: Any) -> None:
        passes().append(PassMarks(mark(device)))

    def turn(*_: Any) -> None:
        passes()[-1].middle = mark(device)

    def forward(name: str, *_: Any) -> None:
        if passes()[-1].middle is None:  # else backward computes the layer again
            passes()[-1].forward.append((name, mark(device)))

    def backward(name: str, *_: Any) -> None:
        passes()[-1].backward.append((name, mark(device)))

    layers = layers_of(model)
    with ExitStack() as stack:
        stack.enter_context(model.register_forward_pre_hook(begin))
        for name, module in layers.items():
            stack.enter_context(module.register_forward_pre_hook(partial(forward, name)))
        for parameter, name in owners_of(layers).items():
            hook = parameter.register_post_accumulate_grad_hook(partial(backward, name))
            stack.enter_context(hook)
        stack.enter_context(model.register_forward_hook(turn))
        yield


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


def spin_stream(launch_s: float) -> None:
    """Keep the current stream busy for a little more than `launch_s`, at most LONGEST_S.

    Kernels queued meanwhile then run without gaps, so their time excludes the host's launches.
    """
    sleep = getattr(torch.cuda, "_sleep", None)  # private: a later torch may lack it
    if sleep is None:
        warnings.warn(
            "torch.cuda._sleep no longer exists, so kernel times may include their launches",
            stacklevel=2,
        )
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
