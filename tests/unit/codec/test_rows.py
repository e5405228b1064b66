"""Layouts of codecs of rows: each value once, parts as lines, shares alike in any bucket."""

from __future__ import annotations

import math

import pytest
import torch

from lab.codec.codecs import Int4, Int8, OneBit, Signs
from lab.codec.layout import WORD
from tests.support import exact

SHAPES = {"fc": (10, 100), "bias": (7,), "conv": (33, 13, 5), "none": (0, 3), "head": (70, 1000)}
NUM_VALUES = sum(map(math.prod, SHAPES.values()))
CODECS = exact.CODECS | {
    "onebit": OneBit(),
    "onebit blocks": OneBit(granularity="block", block_size=64),
    "int4": Int4(24),
    "signs": Signs(100),
}


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
