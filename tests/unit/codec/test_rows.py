"""Codecs of rows: kernels against the definition in buckets of many pieces, and their layouts."""

from __future__ import annotations

import math
from itertools import product
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from lab.codec.base import Codec, Native, Reference
from lab.codec.codecs import Cast, Float8, Int4, Int8, OneBit, Signs, TopK
from lab.codec.layout import WORD, Layout

CPU = torch.device("cpu")
SHAPES = {"fc": (10, 100), "bias": (7,), "conv": (33, 13, 5), "none": (0, 3), "head": (70, 1000)}
NUM_VALUES = sum(map(math.prod, SHAPES.values()))
NATIVE: dict[str, Codec] = {
    "onebit": OneBit(),
    "onebit mean": OneBit("mean"),
    "onebit blocks": OneBit(granularity="block", block_size=64),
    "int8": Int8(128),
    "int4": Int4(24),
    "signs": Signs(100),
    "topk": TopK(0.05),
}
CODECS = {**NATIVE, "bfloat16": Cast("bfloat16"), "float8": Float8(32)}


class Ended(NamedTuple):
    """Messages of all ranks, their residuals, the mean, whether it is finite, residuals of sums."""

    messages: Tensor
    residuals: Tensor | None
    mean: Tensor
    finite: Tensor
    owned: Tensor


def averaged(
    kernels: Reference, layout: Layout, gradients: Tensor, residuals: Tensor | None
) -> Ended:
    """Average in two stages, or by messages of one part that all ranks decode."""
    size = len(gradients)
    messages = torch.zeros(size, layout.num_bytes, dtype=torch.uint8)
    for rank, (gradient, message) in enumerate(zip(gradients, messages, strict=True)):
        kept = None if residuals is None else residuals[rank]
        kernels.encode(layout, gradient, kept, message)
    mean, finite = torch.full((NUM_VALUES,), 7.0), torch.zeros((), dtype=torch.bool)
    owned = [torch.empty(0)]
    if layout.parts == 1:
        kernels.add_up(layout, messages, mean, size, finite)
    else:
        sums = torch.zeros(layout.parts, layout.line_bytes, dtype=torch.uint8)
        for rank in range(size):
            own, lines = layout.part(rank), messages.view(size, size, -1)[:, rank].contiguous()
            kept = None if residuals is None else torch.zeros(own.num_values)
            kernels.reduce(own, lines, kept, sums[rank])
            owned += [] if kept is None else [kept]
        kernels.add_up(layout, sums.view(1, -1), mean, size, finite)
    return Ended(messages, residuals, mean, finite, torch.cat(owned))


@pytest.mark.parametrize("feedback", [True, False])
@pytest.mark.parametrize("name", NATIVE)
def test_kernels_give_what_the_definition_says(name: str, feedback: bool) -> None:
    codec = NATIVE[name]
    kernels = codec.kernels(CPU)
    assert isinstance(kernels, Native)
    for size, two_stages in product((1, 3), (True, False)):
        layout = codec.layout(SHAPES, NUM_VALUES, size if two_stages else 1)
        gradients = torch.randn(size, NUM_VALUES)
        kept = torch.randn(size, NUM_VALUES) if feedback else None
        fast = averaged(kernels, layout, gradients, None if kept is None else kept.clone())
        slow = averaged(Reference(codec), layout, gradients, kept)
        assert torch.equal(fast.messages, slow.messages)
        for one, other in zip(fast[1:], slow[1:], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
        assert fast.finite


@pytest.mark.parametrize("parts", [1, 2, 3, 5, 64])
@pytest.mark.parametrize("name", CODECS)
def test_a_layout_holds_each_value_once_and_parts_are_lines(name: str, parts: int) -> None:
    codec = CODECS[name]
    layout = codec.layout(SHAPES, NUM_VALUES, parts)
    seen = torch.zeros(NUM_VALUES, dtype=torch.int64)
    spans: list[tuple[int, int]] = []
    for piece in layout.pieces:
        seen[piece.start : piece.stop] += 1
        header, payload = codec.row_bytes(piece.columns)
        spans += [(piece.header, piece.rows * header), (piece.payload, piece.rows * payload)]
    for copy in layout.copies:
        seen[copy.start : copy.start + copy.number] += 1
        spans.append((copy.at, 4 * copy.number))
    assert seen.eq(1).all()
    spans = sorted(span for span in spans if span[1])
    assert all(a + n <= b for (a, n), (b, _) in zip(spans, spans[1:], strict=False))
    assert all(
        at % WORD == 0 and (at + n - 1) // layout.line_bytes == at // layout.line_bytes
        for at, n in spans
    )
    assert sum(layout.part(part).num_values for part in range(parts)) == NUM_VALUES


def test_parts_that_are_given_are_lines_alike() -> None:
    layout = Int8(64).layout_of_parts(100, 3)
    assert [(p.start, p.rows, p.columns) for p in layout.pieces[2:4]] == [
        (100, 1, 64),
        (164, 1, 36),
    ]
    assert layout.part(1).pieces == layout.part(2).pieces


def test_a_parameters_share_is_the_same_in_any_bucket() -> None:
    codec = OneBit()
    alone = codec.layout({"fc": (10, 100)}, 1000, 3)
    among = codec.layout({"fc": (10, 100), "more": (9, 80)}, 1720, 3)
    own = [
        [(p.start, p.rows) for p in layout.pieces if p.start < 1000] for layout in (alone, among)
    ]
    assert own[0] == own[1] == [(0, 4), (400, 4), (800, 2)]
