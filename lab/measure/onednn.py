"""The log of oneDNN, the CPU's library of layers: its operations, their formats and times."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch

from lab.measure.printed import printed

# A line has: mark, version, "primitive", "exec", engine, kind, implementation, ..., milliseconds.
MARK, EXECUTED, KIND, IMPLEMENTATION = "onednn_verbose", "exec", 5, 6
# A tensor in it, as in "src:f32:a:blocked:aBcd8b::f0".
FORMAT = re.compile(r"\b(src|dst)[:_]\w+:\w*:blocked:(\w+)")


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
    with printed(1) as log, torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
        call()
    return parsed(log.getvalue())


def implementations(call: Callable[[], object]) -> list[str]:
    """Return the implementations of the convolutions that oneDNN executed during a call."""
    return [each.implementation for each in primitives(call) if each.kind == "convolution"]


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
