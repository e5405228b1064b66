"""Layout: where the values of a bucket lie in the messages that carry them, computed once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

WORD = 16  # bytes that GPUs and NCCL copy at once: lines, headers and payloads begin at multiples
FLOAT_BYTES = 4
CUT_VALUES = 1024  # rows that may be cut are cut at multiples of it
PIECE_VALUES = 2**16  # that a thread of a CPU takes at a time


class Rows(NamedTuple):
    """Values of a bucket, `start` to `stop`, that a codec encodes in rows of `columns` values.

    The last row may be shorter.
    """

    start: int
    stop: int
    columns: int


class RowBytes(NamedTuple):
    """Bytes of an encoded row: of its header (scales) and of its payload (a code per value)."""

    header: int
    payload: int


class Piece(NamedTuple):
    """Whole rows of one part in a message: headers, one after the other, and then payloads.

    Attributes:
        start: place of the first value.
        header, payload: first byte of either in the message.
    """

    start: int
    rows: int
    columns: int
    header: int
    payload: int

    @property
    def stop(self) -> int:
        return self.start + self.rows * self.columns

    def moved(self, values: int, num_bytes: int) -> Piece:
        """Return the piece of as many values and bytes later."""
        header, payload = self.header + num_bytes, self.payload + num_bytes
        return Piece(self.start + values, self.rows, self.columns, header, payload)


class Copy(NamedTuple):
    """Values that travel as they are: `number` from `start` on, from byte `at` of the message."""

    start: int
    number: int
    at: int

    def moved(self, values: int, num_bytes: int) -> Copy:
        """Return the copy of as many values and bytes later."""
        return Copy(self.start + values, self.number, self.at + num_bytes)


@dataclass(frozen=True)
class MessageLayout:
    """A message with a line for each part of a bucket.

    Attributes:
        parts: their number.
        line_bytes: of a line, the same for all, a multiple of WORD; shorter ones end in zeros.
        pieces: encoded rows. copies: values that are not encoded. Both by part, and in the order of
            values within it.
        row_bytes: returns the bytes of a row of a number of values.
    """

    parts: int
    line_bytes: int
    pieces: tuple[Piece, ...]
    copies: tuple[Copy, ...]
    row_bytes: Callable[[int], RowBytes]

    @property
    def num_bytes(self) -> int:
        """Bytes of the message."""
        return self.parts * self.line_bytes

    @cached_property
    def num_encoded(self) -> int:
        """Number of values that are encoded."""
        return sum(piece.rows * piece.columns for piece in self.pieces)

    @property
    def num_values(self) -> int:
        """Number of values."""
        return self.num_encoded + sum(copy.number for copy in self.copies)

    @cached_property
    def plans(self) -> dict[Any, Any]:
        """Results that kernels compute once for a layout, by a key of theirs."""
        return {}

    def part(self, number: int) -> MessageLayout:
        """Return the layout of one part, whose values lie close together, in their order."""
        low, high = number * self.line_bytes, (number + 1) * self.line_bytes
        pieces = [piece for piece in self.pieces if low <= piece.payload < high]
        copies = [copy for copy in self.copies if low <= copy.at < high]
        places, place = dict[int, int](), 0
        for start, count in sorted(
            [*((p.start, p.rows * p.columns) for p in pieces), *(copy[:2] for copy in copies)]
        ):
            places[start] = place
            place += count
        return replace(
            self,
            parts=1,
            pieces=tuple(p.moved(places[p.start] - p.start, -low) for p in pieces),
            copies=tuple(c.moved(places[c.start] - c.start, -low) for c in copies),
        )

    def repeated(self, parts: int, num_values: int) -> MessageLayout:
        """Return the layout of `parts` parts of `num_values` consecutive values, each as this."""
        lines = [(part * num_values, part * self.line_bytes) for part in range(parts)]
        return replace(
            self,
            parts=parts,
            pieces=tuple(piece.moved(*line) for line in lines for piece in self.pieces),
            copies=tuple(copy.moved(*line) for line in lines for copy in self.copies),
        )

    @cached_property
    def tables(self) -> tuple[Tensor, Tensor]:
        """Pieces, cut for threads, and copies: int64 [number, 5] and [number, 3], on the CPU."""
        pieces = [
            cut for p in self.pieces for cut in self.cut(p, max(1, PIECE_VALUES // p.columns))
        ]
        return (
            torch.tensor(pieces, dtype=torch.int64).view(len(pieces), len(Piece._fields)),
            torch.tensor(self.copies, dtype=torch.int64).view(len(self.copies), len(Copy._fields)),
        )

    @cached_property
    def addresses(self) -> tuple[int, int, int, int, int]:
        """Addresses and lengths of `tables`, and `num_encoded`, as C++ kernels take them."""
        pieces, copies = self.tables
        return pieces.data_ptr(), copies.data_ptr(), len(pieces), len(copies), self.num_encoded

    def cut(self, piece: Piece, most: int) -> Iterator[Piece]:
        """Cut a piece into such of at most `most` rows."""
        header, payload = self.row_bytes(piece.columns)
        for row in range(0, piece.rows, most):
            rows = min(most, piece.rows - row)
            at = piece.header + row * header, piece.payload + row * payload
            yield Piece(piece.start + row * piece.columns, rows, piece.columns, *at)


def spans(shapes: Mapping[str, Sequence[int]]) -> Iterator[tuple[str, int, int]]:
    """Yield each parameter's name and its range among the values of all, in their order."""
    start = 0
    for name, shape in shapes.items():
        yield name, start, start + math.prod(shape)
        start += math.prod(shape)


def lay_out(
    rows: Sequence[Rows],
    num_values: int,
    parts: int,
    row_bytes: Callable[[int], RowBytes],
    cuts_rows: bool = False,
) -> MessageLayout:
    """Divide a bucket into parts, and lay out their messages.

    Each of `rows` is divided evenly, so that a parameter's share of a part is the same in any
    bucket. Values that are not encoded are divided evenly all together.

    Args:
        rows: what is encoded, in the order of values; all others are copied.
        num_values: of the bucket.
        parts: one for each rank that sums a part of the bucket, or one.
        cuts_rows: a row may be cut into several.
    """
    shares: list[list[Rows]] = [[] for _ in range(parts)]  # columns 0: values that are copied
    for each in rows:
        unit = CUT_VALUES if cuts_rows else each.columns
        share = -(-(each.stop - each.start) // (unit * parts)) * unit
        for part, low in enumerate(range(each.start, each.stop, share)):
            high = min(low + share, each.stop)
            shares[part].append(Rows(low, high, high - low if cuts_rows else each.columns))
    _share_out(rows, num_values, shares)
    parts_of, longest = list[tuple[list[Piece], list[Copy]]](), 0
    for share in shares:
        pieces, copies, at = list[Piece](), list[Copy](), 0
        for start, stop, columns in sorted(share):
            if not columns:
                copies.append(Copy(start, stop - start, at))
                at = _aligned(at + FLOAT_BYTES * (stop - start))
                continue
            number, rest = divmod(stop - start, columns)  # whole rows, and a shorter last one
            for first, rows_here, width in ((start, number, columns), (stop - rest, 1, rest)):
                if rows_here and width:
                    header, payload = row_bytes(width)
                    payload_at = _aligned(at + rows_here * header)
                    pieces.append(Piece(first, rows_here, width, at, payload_at))
                    at = _aligned(payload_at + rows_here * payload)
        parts_of.append((pieces, copies))
        longest = max(longest, at)
    return MessageLayout(
        parts,
        longest,
        tuple(p.moved(0, n * longest) for n, (own, _) in enumerate(parts_of) for p in own),
        tuple(c.moved(0, n * longest) for n, (_, own) in enumerate(parts_of) for c in own),
        row_bytes,
    )


def _share_out(rows: Sequence[Rows], num_values: int, shares: list[list[Rows]]) -> None:
    """Divide the values between encoded ones, which are copied, among parts, in their order."""
    ends = [0, *(each.stop for each in rows)]
    starts = [*(each.start for each in rows), num_values]
    gaps = list(zip(ends, starts, strict=True))
    size = -(-sum(high - low for low, high in gaps) // len(shares))
    part, room = 0, size
    for low, end in gaps:
        while low < end:
            if not room:
                part, room = part + 1, size
            high = min(end, low + room)
            shares[part].append(Rows(low, high, 0))
            low, room = high, room - (high - low)


def _aligned(at: int) -> int:
    return -(-at // WORD) * WORD


class Factors:
    """Where the matrices M of a bucket lie, and in two messages their factors P and Q^T.

    Args:
        matrices: of each the first value in the bucket, rows, columns, and the rank of its factors.

    Attributes:
        table: int64 [matrices, 6], these and the first values of P and of Q^T, for the kernels.
        num_p, num_q: values of the messages: P, [rows, rank], and Q^T, [rank, columns], of each.
    """

    def __init__(self, matrices: Sequence[tuple[int, int, int, int]]) -> None:
        self.matrices = matrices
        *ps, self.num_p = accumulate((rows * rank for _, rows, _, rank in matrices), initial=0)
        *qs, self.num_q = accumulate((rank * width for _, _, width, rank in matrices), initial=0)
        rows = [[*each, p, q] for each, p, q in zip(matrices, ps, qs, strict=True)]
        self.table = torch.tensor(rows, dtype=torch.int64)
        self.plans: dict[torch.device, Any] = {}  # of kernels on GPUs

    def of(self, flat: Tensor) -> list[Tensor]:
        """Return the matrices among values that are laid out like the bucket's."""
        flat = flat.view(-1)
        return [
            flat[start : start + rows * columns].view(rows, columns)
            for start, rows, columns, _ in self.matrices
        ]

    def ps(self, message: Tensor) -> list[Tensor]:
        """Return each P of a message."""
        return views(message, [(rows, rank) for _, rows, _, rank in self.matrices])

    def qs(self, message: Tensor) -> list[Tensor]:
        """Return each Q^T of a message."""
        return views(message, [(rank, columns) for _, _, columns, rank in self.matrices])


class Draws:
    """Where the parameters of a bucket lie, and in a message the values that are drawn of each.

    Args:
        sizes: values of each parameter, below 2**31; they follow each other.
        counts: how many of each are drawn; these follow each other in the message.
        keys: of each, from 0 to 2**63 - 1.

    Attributes:
        seed: from 0 to SEEDS, the step's: the same draws the same places on every device.
    """

    def __init__(self, sizes: Sequence[int], counts: Sequence[int], keys: Sequence[int]) -> None:
        self.sizes, self.counts, self.seed = list(sizes), list(counts), 0
        self.keys = np.array(keys, dtype=np.int64)
        *starts, _ = accumulate(sizes, initial=0)
        *places, _ = accumulate(counts, initial=0)
        rows = [[*each, 0] for each in zip(starts, sizes, places, counts, strict=True)]
        self._table = np.array(rows, dtype=np.int64).reshape(-1, 5)
        self.plans: dict[torch.device, Any] = {}  # of kernels on GPUs

    @property
    def table(self) -> np.ndarray:
        """The host's: int64 [parameters, 5].

        The first value of each, their number, the first in the message, their number and a seed.
        """
        np.bitwise_xor(self.keys, self.seed, out=self._table[:, 4])
        return self._table


def together(shapes: Sequence[Sequence[int]], like: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return a vector to send, and tensors of `shapes` that share its memory in order."""
    message = like.new_empty(sum(map(math.prod, shapes)))
    return message, views(message, shapes)


def views(message: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return tensors of `shapes` that share the memory of a message, in order."""
    parts = message.view(-1).split([math.prod(shape) for shape in shapes])
    return [part.view(*shape) for part, shape in zip(parts, shapes, strict=True)]
