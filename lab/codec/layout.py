"""Layout: where the values of a bucket lie in the messages that carry them, computed once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

LINE_BYTES = 128  # lines are multiples of it: NCCL and GPUs copy aligned memory in wide words
ALIGNED = 16  # headers and payloads begin at multiples of it
FLOAT_BYTES = 4
CUT_VALUES = 1024  # rows that may be cut are cut at multiples of it
PIECE_VALUES = 2**16  # that a thread of a CPU takes at a time


class Rows(NamedTuple):
    """Values of a bucket that a codec encodes row by row: `rows` x `columns` from `start` on."""

    start: int
    rows: int
    columns: int

    @property
    def stop(self) -> int:
        return self.start + self.rows * self.columns


class RowBytes(NamedTuple):
    """Bytes of an encoded row: of its header (scales) and of its payload (a code per value)."""

    header: int
    payload: int


class Piece(NamedTuple):
    """Rows of one part in a message: headers, one after the other, and then payloads.

    Attributes:
        start: place of the first value.
        header, payload: first byte of either in the message.
    """

    start: int
    rows: int
    columns: int
    header: int
    payload: int


class Copy(NamedTuple):
    """Values that travel as they are: `count` from `start` on, from byte `at` of the message on."""

    start: int
    count: int
    at: int


@dataclass(frozen=True)
class Layout:
    """A message with a line for each part of a bucket; parts are consecutive values.

    Attributes:
        bounds: first value of each part, and the end of the last one.
        line_bytes: bytes of a line, the same for all; the shorter ones end in zeros.
        pieces: encoded rows, in the order of values.
        copies: values that are not encoded, in the order of values.
    """

    bounds: tuple[int, ...]
    line_bytes: int
    pieces: tuple[Piece, ...]
    copies: tuple[Copy, ...]
    row_bytes: Callable[[int], RowBytes]

    @property
    def parts(self) -> int:
        return len(self.bounds) - 1

    @property
    def num_bytes(self) -> int:
        """Bytes of the message."""
        return self.parts * self.line_bytes

    def part(self, number: int) -> Layout:
        """Return the layout of one part: its message is the line, its first value is value 0."""
        low, high = self.bounds[number : number + 2]
        at = number * self.line_bytes
        pieces = [p for p in self.pieces if low <= p.start < high]
        copies = [c for c in self.copies if low <= c.start < high]
        return Layout(
            (0, high - low),
            self.line_bytes,
            tuple(Piece(p.start - low, *p[1:3], p.header - at, p.payload - at) for p in pieces),
            tuple(Copy(c.start - low, c.count, c.at - at) for c in copies),
            self.row_bytes,
        )

    @cached_property
    def num_encoded(self) -> int:
        """Number of values that are encoded."""
        return sum(piece.rows * piece.columns for piece in self.pieces)

    @cached_property
    def tables(self) -> tuple[Tensor, Tensor]:
        """Pieces, cut for threads, and copies: int64 [number, 5] and [number, 3], on the CPU."""
        pieces = [cut for piece in self.pieces for cut in self._cut(piece)]
        return (
            torch.tensor(pieces, dtype=torch.int64).view(len(pieces), len(Piece._fields)),
            torch.tensor(self.copies, dtype=torch.int64).view(len(self.copies), len(Copy._fields)),
        )

    def _cut(self, piece: Piece) -> Iterator[Piece]:
        header, payload = self.row_bytes(piece.columns)
        step = max(1, PIECE_VALUES // piece.columns)
        for row in range(0, piece.rows, step):
            rows = min(step, piece.rows - row)
            at = piece.header + row * header, piece.payload + row * payload
            yield Piece(piece.start + row * piece.columns, rows, piece.columns, *at)


def lay_out(
    rows: Sequence[Rows],
    num_values: int,
    parts: int,
    row_bytes: Callable[[int], RowBytes],
    cuts_rows: bool = False,
    bounds: Sequence[int] | None = None,
) -> Layout:
    """Divide a bucket into parts of about as many bytes, and lay out their messages.

    Args:
        rows: what is encoded, in the order of values; all others are copied.
        num_values: of the bucket.
        parts: one for each rank that sums a part of the bucket, or one.
        row_bytes: returns the bytes of a row of a number of values.
        cuts_rows: a row may be cut in two; otherwise rows stay whole.
        bounds: of the parts, where these are given; no row may cross them.
    """
    regions = _regions(rows, num_values, row_bytes, cuts_rows)
    edges = _balanced(regions, parts) if bounds is None else list(bounds)
    pieces: list[tuple[int, Piece]] = []
    copies: list[tuple[int, Copy]] = []
    longest = 0
    place = 0
    for part, (low, high) in enumerate(zip(edges, edges[1:], strict=False)):
        at = 0
        while place < len(regions) and regions[place].start < high:
            region = regions[place]
            own = region.clipped(low, high)
            if own.codes:
                header, payload = row_bytes(own.columns)
                payload_at = _aligned(at + own.rows * header)
                pieces.append((part, Piece(own.start, own.rows, own.columns, at, payload_at)))
                at = _aligned(payload_at + own.rows * payload)
            else:
                copies.append((part, Copy(own.start, own.columns, at)))
                at = _aligned(at + FLOAT_BYTES * own.columns)
            if region.stop > high:
                break
            place += 1
        longest = max(longest, at)
    line = -(-longest // LINE_BYTES) * LINE_BYTES
    return Layout(
        tuple(edges),
        line,
        tuple(Piece(*p[:3], n * line + p.header, n * line + p.payload) for n, p in pieces),
        tuple(Copy(*c[:2], n * line + c.at) for n, c in copies),
        row_bytes,
    )


def _aligned(at: int) -> int:
    return -(-at // ALIGNED) * ALIGNED


class _Region(NamedTuple):
    """Values that are cut into parts at multiples of `unit` values from `start` on.

    Attributes:
        columns: values of a row; of values that are not encoded, all of them.
        unit_bytes: of `unit` values in a message.
        codes: they are encoded.
        whole: they are one row, of which each part has a piece.
    """

    start: int
    stop: int
    columns: int
    unit: int
    unit_bytes: float
    codes: bool
    whole: bool

    @property
    def rows(self) -> int:
        return (self.stop - self.start) // self.columns

    @property
    def num_units(self) -> int:
        return -(-(self.stop - self.start) // self.unit)

    def clipped(self, low: int, high: int) -> _Region:
        start, stop = max(self.start, low), min(self.stop, high)
        columns = stop - start if self.whole else self.columns
        return self._replace(start=start, stop=stop, columns=columns)


def _regions(
    rows: Sequence[Rows], num_values: int, row_bytes: Callable[[int], RowBytes], cuts_rows: bool
) -> list[_Region]:
    """List encoded rows, and the values between them, in the order of values."""
    found: list[_Region] = []
    end = 0
    for each in [*rows, Rows(num_values, 0, 1)]:
        if end < each.start:
            found.append(_Region(end, each.start, each.start - end, 1, FLOAT_BYTES, False, True))
        if cuts_rows:
            share = sum(row_bytes(each.columns)) / max(1, each.columns) * CUT_VALUES
            for row in range(each.rows):
                start = each.start + row * each.columns
                stop = start + each.columns
                found.append(_Region(start, stop, each.columns, CUT_VALUES, share, True, True))
        elif each.rows:
            size = sum(row_bytes(each.columns))
            found.append(_Region(*each[:1], each.stop, each.columns, each.columns, size, True, False))
        end = each.stop
    return found


def _balanced(regions: Sequence[_Region], parts: int) -> list[int]:
    """Return the bounds of parts of about as many bytes, at the ends of units."""
    sizes = [region.num_units * region.unit_bytes for region in regions]
    before = [0.0, *accumulate(sizes)]
    end = regions[-1].stop if regions else 0
    bounds, place = [0], 0
    for part in range(1, parts):
        wanted = before[-1] * part / parts
        while place < len(regions) and before[place + 1] < wanted:
            place += 1
        if place == len(regions):
            bounds.append(end)
            continue
        region = regions[place]
        units = -(-(wanted - before[place]) // region.unit_bytes)
        bounds.append(min(region.start + int(units) * region.unit, region.stop))
    return [*bounds, end] if parts else bounds
