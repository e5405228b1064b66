"""The wire format of 1-bit SGD: its bytes, and its two stages on simulated ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lab.codec.onebit import codec
from lab.codec.onebit.message import LINE_BYTES, Matrix, Message
from lab.codec.scratch import ScratchBuffer

MATRICES = [Matrix("a", 3, 7, 33), Matrix("b", 240, 1, 64), Matrix("c", 310, 4, 9)]
NUM_VALUES = 350


def message(size: int, lines: int) -> Message:
    return Message.within(ScratchBuffer(), MATRICES, size, lines, torch.empty(0))


def views(flat: Tensor) -> list[Tensor]:
    return [matrix.view(flat) for matrix in MATRICES]


def shards(flat: Tensor, rank: int, size: int) -> list[Tensor]:
    return [matrix.view(flat)[matrix.shard(rank, size)] for matrix in MATRICES]


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_every_row_is_in_the_shard_of_one_rank(size: int) -> None:
    for matrix in MATRICES:
        rows = [r for rank in range(size) for r in range(matrix.rows)[matrix.shard(rank, size)]]
        assert rows == list(range(matrix.rows))


def test_a_line_holds_scales_then_bits_then_zeros() -> None:
    matrix = Matrix("w", 0, 3, 9)
    sent = Message.within(ScratchBuffer(), [matrix], 2, 2, torch.empty(0))
    sent.encode([torch.tensor([[-2.0] * 8 + [4.0]] * 3)], [None], "zero")
    assert sent.bytes.shape == (2, LINE_BYTES)
    scales, bits = torch.tensor([-2.0, 4.0]).view(torch.uint8).tolist(), [0, 1]
    full = 2 * scales + 2 * bits
    short = scales + 8 * [0] + bits  # rank 1 has one row
    for line, begin in zip(sent.bytes.tolist(), (full, short), strict=True):
        assert line == begin + [0] * (LINE_BYTES - len(begin))


@pytest.mark.parametrize("threshold", codec.THRESHOLDS)
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_both_stages_are_the_codec_on_each_matrix(size: int, threshold: str) -> None:
    gradients = torch.randn(size, NUM_VALUES)
    outgoing = [message(size, size) for _ in range(size)]
    for sent, gradient in zip(outgoing, gradients, strict=True):
        sent.encode(views(gradient), [None] * 3, threshold)
    gathered = message(size, size)
    for rank in range(size):
        received, reduced = message(size, size), message(size, 1)
        received.bytes.copy_(torch.stack([sent.bytes[rank] for sent in outgoing]))
        room = shards(torch.empty(NUM_VALUES), rank, size)
        reduced.encode_sum(received, room, [None] * 3, threshold)
        gathered.bytes[rank] = reduced.bytes[0]
    out = torch.full((NUM_VALUES,), 7.0)
    gathered.decode(views(out))

    decoded = [torch.stack([through(rows, threshold) for rows in m]) for m in by_matrix(gradients)]
    expected = torch.full((NUM_VALUES,), 7.0)
    for rows, parts in zip(views(expected), decoded, strict=True):
        rows.copy_(through(sum(parts, torch.zeros_like(rows)), threshold))
    torch.testing.assert_close(out, expected)


def by_matrix(gradients: Tensor) -> list[list[Tensor]]:
    """Return each matrix of every rank's gradient."""
    return [list(of_ranks) for of_ranks in zip(*map(views, gradients), strict=True)]


def through(values: Tensor, threshold: str) -> Tensor:
    """Encode and decode one matrix by itself."""
    rows, columns = values.shape
    scales = torch.empty(1, rows, 2)
    bits = torch.empty(1, rows, codec.bit_bytes(columns), dtype=torch.uint8)
    codec.encode(values.contiguous(), None, threshold, scales, bits)
    out = torch.empty(rows, columns)
    codec.decode(scales, bits, out)
    return out
