"""The log of oneDNN, the CPU's library of layers: its operations, their formats and times."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import StringIO

import torch

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


@contextmanager
def printed(descriptor: int) -> Iterator[StringIO]:
    """Send what the process prints meanwhile to a buffer, which is filled when the context ends.

    Args:
        descriptor: 1, standard output, or 2, the error output.
    """
    text = StringIO()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    kept = os.dup(descriptor)
    with tempfile.TemporaryFile("w+") as file:
        os.dup2(file.fileno(), descriptor)
        try:
            yield text
        finally:
            os.dup2(kept, descriptor)
            os.close(kept)
            file.seek(0)
            text.write(file.read())
