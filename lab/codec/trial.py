"""A trial of a user's codec, so that a mistake shows before the first step, in one line."""

from __future__ import annotations

from contextlib import suppress
from copy import deepcopy
from typing import Any, cast

import torch
from torch import Tensor

from lab.codec.base import DEFINING, Codec
from lab.settings import checks
from lab.settings.own_code import is_labs

SHAPES = {"weight": (64, 100), "bias": (64,)}
NUM_VALUES = 64 * 101
STEPS, GROWTH = 30, 100.0  # one that sends nothing keeps as many gradients as there were steps


def require_sound(codec: Codec, keeps: bool) -> None:
    """Refuse a user's codec that breaks a rule of `Codec`, on a CPU and with values of its own.

    Args:
        keeps: what it leaves out is added to the next values.

    Raises:
        ValueError: names its class and the rule.
        Exception: its own code raised it.
    """
    kind = type(codec)
    if not isinstance(cast(object, codec), Codec):
        raise ValueError(f"codec={kind.__qualname__}: must be a subclass of lab.codec.base.Codec")
    if is_labs(kind, *DEFINING):
        return
    with suppress(TypeError):  # of what no copy can be made of, such as a file
        codec = deepcopy(codec)  # it may count its calls
    if fault := _fault_of_sizes(NUM_VALUES, [codec.row_bytes(NUM_VALUES)] * 2):
        raise ValueError(f"codec={kind.__qualname__}: {fault}")  # a layout needs sizes
    values = torch.randn(NUM_VALUES, generator=torch.Generator().manual_seed(0), device="cpu")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for piece in codec.layout(SHAPES, NUM_VALUES, parts=1).pieces:
            rows = values[piece.start : piece.stop].view(piece.rows, piece.columns)
            if fault := _fault(codec, rows) or (_growth(codec, rows) if keeps else ""):
                raise ValueError(f"codec={kind.__qualname__}: {fault}")


def _fault(codec: Codec, rows: Tensor) -> str:
    """Return which rule a codec breaks with `rows`; empty: none."""
    number, columns = rows.shape
    sizes: list[Any] = [codec.row_bytes(columns) for _ in range(2)]
    if fault := _fault_of_sizes(columns, sizes):
        return fault
    given = rows.clone()
    once, again = _decoded(codec, given, *sizes[0])
    if fault := _fault_of_sizes(columns, [sizes[0], codec.row_bytes(columns)]):
        return fault
    found = f"{once.dtype} {[*once.shape]}" if isinstance(once, Tensor) else type(once).__name__
    if found != (must := f"{torch.float32} {[number, columns]}"):
        return f"read returns {found}; must return {must}"
    if not torch.equal(given, rows):
        return "write changes the values that it is given; it must change only header and payload"
    if not torch.equal(once, again):
        return (
            "a second call of read returns different values, so ranks would get different weights"
        )
    for bad in (torch.nan, torch.inf):
        given[0, columns // 2] = bad
        if _decoded(codec, given.clone(), *sizes[0])[0][0].isfinite().all():
            return (
                f"a row with {bad} is read as finite values; read must return a value that is not "
                "finite, so that all ranks skip the step"
            )
    return ""


def _fault_of_sizes(columns: int, sizes: list[Any]) -> str:
    """Return that calls of row_bytes gave no sizes, or several; empty: they did not."""
    sizes = [tuple(each) if isinstance(each, tuple) else each for each in sizes]
    first = sizes[0]
    is_pair = isinstance(first, tuple) and len(first) == 2
    if is_pair and first == sizes[1] and all(checks.is_whole(n) and n >= 0 for n in first):
        return ""
    found = " and then ".join(dict.fromkeys(map(str, sizes)))
    return (
        f"row_bytes({columns}) returns {found}; must be two whole numbers of at least 0 that "
        "depend only on its argument and the settings"
    )


def _growth(codec: Codec, rows: Tensor) -> str:
    """Return that residuals would grow without end; empty: they do not.

    A codec that scales up what it sends, to be right on average, often leaves out more than it was
    given.
    """
    residual = torch.zeros_like(rows)
    for _ in range(STEPS):
        values = rows + residual
        residual = values - _decoded(codec, values.clone(), *codec.row_bytes(rows.shape[1]))[0]
    if residual.norm() <= GROWTH * rows.norm():
        return ""
    return (
        "the values that read returns differ so much from those given to write that residuals "
        "grow in every step; use memory=none"
    )


def _decoded(codec: Codec, rows: Tensor, header_bytes: int, payload_bytes: int) -> list[Tensor]:
    """Encode rows, and decode them twice."""
    header, payload = (
        torch.zeros(len(rows), num_bytes, dtype=torch.uint8, device="cpu")
        for num_bytes in (header_bytes, payload_bytes)
    )
    codec.write(rows, header, payload)
    return [codec.read(header, payload, rows.shape[1]) for _ in range(2)]
