"""The values of largest magnitude on GPUs, in Triton: exactly as many, and the first of equals.

Four launches encode all rows of a bucket, whatever its values; one decodes.

1. `sample_rows`: a sample gives each row a limit that somewhat more values than wanted exceed (Lin
   et al., Deep Gradient Compression, 2018, section 3). Of a short row the sample is all.
2. `collect_largest`: the one pass over memory adds the residual, and copies what exceeds the limit.
3. `find_last`: the smallest magnitude to send, digit by digit, and how many equal to it. One
   program for a row: it reads the copies, or all sums if the sample was not like the rest.
4. `write_largest`: each program finds out how many values come before its own by looking back at
   what others have counted (Merrill and Garland, Single-pass Parallel Prefix Scan with Decoupled
   Look-back, NVIDIA, 2016): so indices ascend, and messages do not depend on who ran first.

Programs wait for such of lower numbers alone, which GPUs start before them.
"""

# Triton takes options of a launch that its kernels do not name, and plain values for constants.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lab.codec.base import push, together
from lab.codec.gpu_topk_kernels import (
    collect_largest,
    find_last,
    sample_rows,
    spread_largest,
    write_largest,
)
from lab.codec.kernels import Messages, Peers, Residual
from lab.codec.layout import FLOAT_BYTES, MessageLayout

SAMPLE_BITS = 12  # a sample has 2**12 values, 8 for each of 512 threads
SAMPLE_WARPS, SAMPLE_REGISTERS = 16, 64
TILE, WARPS = 2048, 4  # values of a program that collects, 16 for each thread
SEARCHED = 4096  # values that a search reads at once
WRITTEN, WRITING_WARPS = 1024, 4  # values that are looked at at once to be written
SPREAD = 16_384  # values of a program that decodes
SIZES = SPREAD, 2048, 512  # and of what it reads at once: of all, and of a message
DEVIATIONS = 6  # by which a sample may be off
DIGIT_BITS = 7  # of a magnitude's 31 bits, which a pass of a search finds


class Row(NamedTuple):
    """A row of a layout.

    Attributes:
        start, columns: its first value and their number. sent: how many are sent.
        payload: their first byte in the message.
        rank: place of the limit among the sample's magnitudes; above their number: there is none.
        copies, room: first place and number of values that its copies may take.
        tile, tiles: its first program, of those that collect, and their number.
    """

    start: int
    columns: int
    sent: int
    payload: int
    rank: int
    copies: int
    room: int
    tile: int
    tiles: int


class TopKPart(NamedTuple):
    """Values that a program takes: of a row, or such that travel as they are.

    Attributes:
        row: its number; -1: none.
        first: place in the row, or the first value. number: of values.
        at: byte in the message; of a row, 1 if whole tiles are words of 16 bytes.
    """

    row: int
    first: int
    number: int
    at: int


class TopKTables(NamedTuple):
    """Tables of a layout, and memory that stays.

    Attributes:
        rows: int64 [rows, 9], see Row. tiles, spread: int64 [programs, 4], see Part.
        limits: int32 [rows, 5], of each row its limit, how many magnitudes exceed it and how many
            equal it; the smallest magnitude to send, and how many equal to it.
        counts: int32 [tiles, 2], where a tile's copies begin, and their number.
        progress: int64 [tiles], what is sent of it, and of all before: see _look_back.
        copied: int64 [room], each a value's bits and, below them, its place in the row.
        sums: float32 [values], of messages; its first use makes it.
    """

    rows: Tensor
    tiles: Tensor
    spread: Tensor
    limits: Tensor
    counts: Tensor
    progress: Tensor
    copied: Tensor
    sums: list[Tensor]


class TritonTopK:
    """See lab.codec.base.Reference.

    Args:
        share: of the values of a row that are sent, rounded up.
    """

    def __init__(self, share: float) -> None:
        self._share = share

    def encode(
        self,
        layout: MessageLayout,
        values: Tensor,
        residual: Residual,
        message: Tensor,
        finite: Tensor | None = None,
    ) -> None:
        own = self._tables(layout, values.device)
        rows, limits = own.rows, own.limits
        sums = values if residual is None else residual
        with torch.cuda.device_of(values):
            if num_rows := len(rows):
                arguments = values, residual, rows, limits, own.progress, SAMPLE_BITS
                sample_rows[(num_rows,)](
                    *arguments, num_warps=SAMPLE_WARPS, maxnreg=SAMPLE_REGISTERS
                )
            collected = message, rows, own.tiles, limits, own.counts, own.copied
            arguments = values, residual, *collected, finite, TILE
            collect_largest[(len(own.tiles),)](*arguments, num_warps=WARPS)
            if num_rows:
                arguments = sums, rows, limits, own.copied, SEARCHED, DIGIT_BITS
                find_last[(num_rows,)](*arguments, num_warps=SAMPLE_WARPS)
                arguments = sums, residual, *collected, own.progress, WRITTEN
                write_largest[(len(own.progress),)](*arguments, num_warps=WRITING_WARPS)

    def add_up(
        self, layout: MessageLayout, messages: Tensor, out: Tensor, divisor: int, finite: Tensor
    ) -> None:
        own, number = self._tables(layout, out.device), len(messages)
        lanes = 2 << (number - 1).bit_length()  # a begin and an end for each message
        arguments = messages, number, messages.stride(0), out, own.rows, own.spread, divisor, finite
        with torch.cuda.device_of(out):
            spread_largest[(len(own.spread),)](*arguments, lanes, *SIZES, num_warps=WARPS)

    def reduce(
        self, layout: MessageLayout, messages: Messages, residual: Residual, out: Messages
    ) -> None:
        messages = together(messages)
        own = self._tables(layout, messages.device)
        if not own.sums:
            finite = torch.ones((), dtype=torch.bool, device=messages.device)
            own.sums.extend((torch.empty(layout.num_values, device=messages.device), finite))
        sums, finite = own.sums
        self.add_up(layout, messages, sums, 1, finite)
        self.encode(layout, sums, residual, out[0] if isinstance(out, Peers) else out)
        push(out)

    def _tables(self, layout: MessageLayout, device: torch.device) -> TopKTables:
        """Return what stays of a layout, made at the first call."""
        key = TopKTables, self._share, device
        if key not in layout.plans:
            layout.plans[key] = made_tables(layout, self._share, device)
        return layout.plans[key]


def made_tables(layout: MessageLayout, share: float, device: torch.device) -> TopKTables:
    """Divide the rows of a layout, and values that travel as they are, among programs."""
    rows, tiles, spread, copies = list[Row](), list[TopKPart](), list[TopKPart](), 0
    for piece in layout.pieces:
        for number in range(piece.rows):
            columns, sent = piece.columns, math.ceil(share * piece.columns)
            at = piece.payload + number * 2 * FLOAT_BYTES * sent
            rank, room = _limit(columns, sent)
            first = len(tiles)
            is_even = int((piece.start + number * columns) % 4 == 0)
            tiles += _parts(len(rows), columns, TILE, is_even)
            row = piece.start + number * columns, columns, sent, at, rank, copies, room
            spread += _parts(len(rows), columns, SPREAD, is_even)
            rows.append(Row(*row, first, len(tiles) - first))
            copies += room
    num_tiles = len(tiles)
    for start, count, at in layout.copies:
        own = [
            TopKPart(-1, start + first, min(TILE, count - first), at + FLOAT_BYTES * first)
            for first in range(0, count, TILE)
        ]
        tiles, spread = tiles + own, spread + own

    def table(entries: list[Any], width: int) -> Tensor:
        return torch.tensor(entries, dtype=torch.int64, device=device).view(len(entries), width)

    return TopKTables(
        *(table(rows, len(Row._fields)), table(tiles, len(TopKPart._fields))),
        table(spread, len(TopKPart._fields)),
        torch.zeros(len(rows), 5, dtype=torch.int32, device=device),
        torch.zeros(num_tiles, 2, dtype=torch.int32, device=device),
        torch.zeros(num_tiles, dtype=torch.int64, device=device),
        torch.zeros(copies, dtype=torch.int64, device=device),
        [],
    )


def _parts(row: int, columns: int, size: int, is_even: int) -> list[TopKPart]:
    return [
        TopKPart(row, first, min(size, columns - first), is_even)
        for first in range(0, columns, size)
    ]


def _limit(columns: int, sent: int) -> tuple[int, int]:
    """Return the rank of a row's limit in its sample, and room for what exceeds it.

    A sample that is all of a row has no more above the limit than are sent.
    """
    size = 1 << SAMPLE_BITS
    if columns <= size:
        return sent, sent
    expected = sent * size / columns
    rank = math.ceil(expected + DEVIATIONS * math.sqrt(expected) + DEVIATIONS)
    room = (rank + DEVIATIONS * math.sqrt(rank) + DEVIATIONS) * columns / size
    return rank, columns if rank > size else min(columns, math.ceil(room))
