"""Memory layouts of a convolution's tensors, and the reorders that libraries add on their own.

Those of oneDNN, the CPU's library of layers, are read from its log.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from io import StringIO
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.nn.functional import conv2d
from torch.profiler import ProfilerActivity, profile

from lab.convolution import Pass, Problem
from lab.convolution.algorithms import LIBRARY, gradients

# A line has: mark, version, "primitive", "exec", engine, kind, implementation, ..., milliseconds.
MARK, EXECUTED, KIND, IMPLEMENTATION = "onednn_verbose", "exec", 5, 6
# A tensor in it, as in "src:f32:a:blocked:aBcd8b::f0".
FORMAT = re.compile(r"\b(src|dst)[:_]\w+:\w*:blocked:(\w+)")
# cuDNN's kernels that only change a layout, as in cudnn::engines_precompiled::nchwToNhwcKernel.
TRANSPOSE = re.compile(r"(nchw|nhwc|foldedNhwc)To(Nchw|Nhwc|FoldedNhwc)Kernel")
COPY = "aten::copy_"
NHWC = torch.channels_last, torch.contiguous_format  # of a tensor, and of its gradient
NCHW = torch.contiguous_format, torch.channels_last

# A change of layout inside a library's call: its formats of both, as "abcd>acdb", and seconds.
Reorder = tuple[str, float]


class MemoryLayout(StrEnum):
    """The order of a tensor's values in memory.

    NCHW: image, channel, row, column, the last one nearest. NHWC: torch's channels_last.
    BLOCKED: as oneDNN's convolutions leave their outputs, as NCHW in blocks of 8 channels.
    """

    NCHW = "NCHW"
    NHWC = "NHWC"
    BLOCKED = "blocked"


@dataclass(frozen=True)
class Moves:
    """Data that a call moves in memory without computing.

    Attributes:
        reorders: of oneDNN or cuDNN. copy_s: seconds of each of torch's own copies.
    """

    reorders: tuple[Reorder, ...]
    copy_s: tuple[float, ...]

    @property
    def reorder_s(self) -> float:
        return sum(seconds for _, seconds in self.reorders)


def layouts_for(device: torch.device, dtype: torch.dtype) -> list[MemoryLayout]:
    """Return the layouts that convolutions can have; blocked ones are float32 on CPUs."""
    blocked = device.type == "cpu" and dtype == torch.float32
    return [each for each in MemoryLayout if each is not MemoryLayout.BLOCKED or blocked]


def calls_in(
    layout: MemoryLayout,
    problem: Problem,
    x: Tensor,
    w: Tensor,
    dy: Tensor,
    x_is_data: bool = False,
) -> dict[Pass, Callable[[], Tensor]]:
    """Return a call of each pass of a convolution, on copies of its tensors in a layout.

    Blocked are inputs and gradients of outputs; torch keeps filters that are trained in NCHW.

    Args:
        x: [N, C, H, W]. w: [K, C / groups, R, S]. dy: the gradient of the output [N, K, H', W'].
        x_is_data: no layer has written x, so that it comes in NCHW where the layout is blocked.
    """
    x_blocked = Tensor.to_mkldnn if x_is_data else _blocked
    # Unlike `contiguous`, `to` changes the layout also where one channel leaves no difference.
    to_nhwc = partial(Tensor.to, memory_format=torch.channels_last)
    changes: dict[MemoryLayout, tuple[Callable[[Tensor], Tensor], ...]] = {
        MemoryLayout.NCHW: (Tensor.contiguous,) * 3,
        MemoryLayout.NHWC: (to_nhwc,) * 3,
        MemoryLayout.BLOCKED: (x_blocked, Tensor.contiguous, _blocked),
    }
    x, w, dy = (change(each) for change, each in zip(changes[layout], (x, w, dy), strict=True))
    return {
        Pass.FORWARD: lambda: LIBRARY.forward(x, w, problem),
        Pass.BACKWARD_DATA: lambda: gradients(problem, dy, x, w, (True, False, False))[0],
        Pass.BACKWARD_WEIGHTS: lambda: gradients(problem, dy, x, w, (False, True, False))[1],
    }


def moves(call: Callable[[], object], device: torch.device) -> Moves:
    """Return what oneDNN or cuDNN reorders during a call, and what torch copies."""
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    executed: list[Primitive] = []
    with (
        captured_stdout(2),
        profile(activities=activities) as profiler,
    ):  # it announces itself there
        if on_gpu:
            call()
            torch.cuda.synchronize(device)
        else:
            executed = primitives(call)
    averages = profiler.key_averages()
    reorders = transposes(averages) if on_gpu else reorders_among(executed)
    return Moves(tuple(reorders), tuple(copies(averages, on_gpu)))


def reorders_among(executed: Iterable[Primitive]) -> list[Reorder]:
    """Return oneDNN's changes of layout; its reorders into the same format copy, or change type."""
    found = (
        (each.formats.get("src", ""), each.formats.get("dst", ""), each.seconds)
        for each in executed
        if each.kind == "reorder"
    )
    return [(f"{source}>{target}", took_s) for source, target, took_s in found if source != target]


def transposes(averages: Iterable[Any]) -> list[Reorder]:
    """Return cuDNN's changes of layout among kernels, which have them in their names.

    Args: averages: torch.profiler's events, summed by name.
    """
    found: list[Reorder] = []
    for each in averages:
        formats = TRANSPOSE.search(each.key)
        if formats and each.device_type == DeviceType.CUDA:
            seconds = each.self_device_time_total / 1e6 / each.count
            found += [(">".join(formats.groups()).lower(), seconds)] * each.count
    return found


def copies(averages: Iterable[Any], on_gpu: bool) -> list[float]:
    """Return the mean seconds of torch's copies, as often as there are copies.

    Args: averages: as above. on_gpu: take the time of kernels instead of the host's.
    """
    for each in averages:
        if each.key == COPY and each.device_type == DeviceType.CPU:
            total_us = each.self_device_time_total if on_gpu else each.self_cpu_time_total
            return [total_us / 1e6 / each.count] * each.count
    return []


class MixedLayouts:
    """A transform that computes convolutions in NHWC, and puts tensors back into NCHW after each.

    Gradients are converted likewise. Any module that knows one layout alone costs a model this.
    """

    def __call__(self, model: nn.Module) -> nn.Module:
        """Change the convolutions of a model, and return it."""
        for layer in model.modules():
            if isinstance(layer, nn.Conv2d):
                layer.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
                layer.register_forward_pre_hook(lambda _, inputs: _Convert.apply(inputs[0], *NHWC))
                layer.register_forward_hook(lambda _, __, output: _Convert.apply(output, *NCHW))
        return model


class _Convert(torch.autograd.Function):
    """Change the memory format of a tensor, and change that of its gradient back."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, into: torch.memory_format, back: torch.memory_format
    ) -> Tensor:
        ctx.back = back
        return x.contiguous(memory_format=into)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return dy.contiguous(memory_format=ctx.back), None, None


def _blocked(tensor: Tensor) -> Tensor:
    """Return a tensor as a convolution leaves it: one of 1x1 filters that changes no value."""
    channels = tensor.shape[1]
    return conv2d(tensor.to_mkldnn(), torch.eye(channels).view(channels, channels, 1, 1))


@dataclass(frozen=True)
class Primitive:
    """One operation that oneDNN executed.

    Attributes:
        kind: "convolution", "reorder" and others.
        implementation: the code that ran, as in "jit:avx2".
        formats: memory format of "src" and "dst", if the log has it: abcd is NCHW, acdb is NHWC,
            and aBcd8b has channels in blocks of eight.
        seconds: by oneDNN's own clock.
    """

    kind: str
    implementation: str
    formats: dict[str, str]
    seconds: float


def primitives(call: Callable[[], object]) -> list[Primitive]:
    """Return what oneDNN executed during a call, in order; empty: it was not asked."""
    with captured_stdout(1) as log, torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
        call()
    return parsed(log.getvalue())


def implementation(call: Callable[[], object]) -> str | None:
    """Return which of its convolutions oneDNN executed last in a call; None: it does not say."""
    ran = [each.implementation for each in primitives(call) if each.kind == "convolution"]
    return ran[-1] if ran else None


def parsed(log: str) -> list[Primitive]:
    """Read the executed operations of a log; other lines are passed over."""
    lines = [line.split(",") for line in log.splitlines()]
    return [
        Primitive(
            fields[KIND],
            fields[IMPLEMENTATION],
            dict(FORMAT.findall(",".join(fields))),
            float(fields[-1]) / 1e3,
        )
        for fields in lines
        if fields[0] == MARK and EXECUTED in fields[:KIND]
    ]


@contextmanager
def captured_stdout(descriptor: int) -> Iterator[StringIO]:
    """Send what the process prints meanwhile to a buffer, which is filled when the context ends.

    Args:
        descriptor: 1, standard output, or 2, the error output.
    """
    text = StringIO()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    kept = os.dup(descriptor)
    with tempfile.TemporaryFile("w+", encoding="utf-8") as file:
        os.dup2(file.fileno(), descriptor)
        try:
            yield text
        finally:
            os.dup2(kept, descriptor)
            os.close(kept)
            file.seek(0)
            text.write(file.read())
