"""The kernels of codecs in Triton, for CUDA tensors: one launch encodes a bucket, one decodes it.

A program takes some rows of one piece, as the tables of a layout tell it, and so many values of
each at once: a tile, [rows, units of the payload, values of a unit]. Rows of up to LONGEST values
stay in registers, so that gradient and residual are read once. Longer ones are read again to be
written; their programs are so large that all running ones together fit into the GPU's cache. The
number that all values of a parameter share, of `signs`, is the sum of what a launch before finds in
spans of it. Nothing waits for the host, and no temporary is as large as the gradient.
"""

# Triton takes options of a launch that its kernels do not name, and plain values for constants.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lab.codec.gpu_kernels import add_magnitudes, decode_rows, encode_rows
from lab.codec.gpu_topk import TritonTopK
from lab.codec.kernels import Messages, Peers, Reading, Residual
from lab.codec.layout import FLOAT_BYTES, MessageLayout, Piece

READ = 4096
TILE = 2048  # values of a program of short rows
LONGEST = 4096  # values of a row that registers hold: 16 for each of 256 threads
LONG_TILE = 4096  # values of a longer row that are read at once
SPAN = 65_536  # values that a program of `add_magnitudes` adds up
FEW = 1 / 8  # a share of a bucket whose rows join wider ones: a launch costs more than idle lanes
WARP = 32
REGISTERS = 2**15  # of a program at most: half of a multiprocessor's, so that two run at once
SPARED = 2**10  # of one that sums messages: with all of them ptxas puts some into memory
READINGS = ("sides", "mean", "signs", "levels", "float8", "bfloat16", "float16")  # see _read
NUM_SCALES = (2, 2, 1, 2, 1, 0, 0)  # float32 numbers in the header of a row, by reading


class Form(NamedTuple):
    """The constants of a launch: a codec's wire format, and the size of a tile.

    Attributes:
        reading: the place in READINGS of how a value is read.
        per_unit, unit_bytes: values of a unit of the payload, and its bytes.
        even_bytes: of 16 values of a payload; a program of even rows begins at a multiple.
        num_levels: of the reading "levels".
        scales: float32 numbers in the header of a row.
        rows, units, width: of a tile; `width` values of a row are `units` of its payload.
        block: values of each of the blocks that follow each other in a tile's one row; 0: none do.
        on_chip: a row has no more than `width` values, or the program takes no more of it.
        span: values that a program of `add_magnitudes` adds up.
    """

    reading: int
    per_unit: int
    unit_bytes: int
    even_bytes: int  # a field, because kernels of Triton 3.8 see no properties
    num_levels: int
    scales: int
    rows: int = 1
    units: int = 1
    width: int = 1
    on_chip: bool = True
    span: int = 1
    per_thread: int = 16
    block: int = 0

    def tile(self, width: int, on_chip: bool = True, size: int = TILE) -> Form:
        """Return the same with tiles of `width` values of a row, a power of two."""
        rows, units = max(1, size // width), width // self.per_unit
        return self._replace(rows=rows, units=units, width=width, on_chip=on_chip)

    def options(self, sums: bool = False) -> dict[str, Any]:
        """Return the launch's: threads, registers of each, and a rounding of products before sums.

        Args:
            sums: it encodes a sum of messages.
        """
        warps = max(4, self.rows * self.width // (self.per_thread * WARP))
        registers = REGISTERS - SPARED * sums
        most = registers // (warps * WARP) if warps > 4 else None  # few threads need no limit
        return {"num_warps": warps, "maxnreg": most, "enable_fp_fusion": False}

    @property
    def shares_rows(self) -> bool:
        """Whether a row may be as long as a parameter, so that many programs share it."""
        return READINGS[self.reading] in ("signs", "bfloat16", "float16")


class RowProgram(NamedTuple):
    """A program's rows: those of a Piece, of which it may take columns from `first` on alone.

    Attributes:
        rows: 0: `columns` values that are copied, at byte `header` of the message.
        even: addresses and columns are multiples of 16 bytes and values.
        span: the first span of its row; the next rows' follow.
    """

    start: int
    rows: int
    columns: int
    header: int
    payload: int
    first: int
    even: int
    span: int


class Triton:
    """See lab.codec.base.Reference."""

    def __init__(self, reading: Reading) -> None:
        at = READINGS.index(reading.kind)
        even_bytes = min(16, 16 // reading.per_unit * reading.unit_bytes)
        units = reading.per_unit, reading.unit_bytes, even_bytes
        self._block = reading.block
        self._form = Form(at, *units, reading.num_levels, NUM_SCALES[at], span=SPAN)

    def encode(
        self,
        layout: MessageLayout,
        values: Tensor,
        residual: Residual,
        message: Tensor,
        finite: Tensor | None = None,
    ) -> None:
        self._encode(layout, (values, 0, 0), residual, message, finite)

    def reduce(
        self, layout: MessageLayout, messages: Messages, residual: Residual, out: Messages
    ) -> None:
        apart = messages.offsets if isinstance(messages, Peers) else messages.stride(0)
        self._encode(layout, (messages[0], len(messages), apart), residual, out, None)

    def add_up(
        self, layout: MessageLayout, messages: Tensor, out: Tensor, divisor: int, finite: Tensor
    ) -> None:
        sent = messages, len(messages), messages.stride(0)
        with torch.cuda.device_of(out):
            for form, table in self._tables(layout, out.device).decode:
                arguments = *sent, out, table, divisor, finite, form
                decode_rows[(len(table),)](*arguments, **form.options())

    def _encode(
        self,
        layout: MessageLayout,
        source: tuple[Tensor, int, int | Tensor],
        residual: Residual,
        out: Messages,
        finite: Tensor | None,
    ) -> None:
        first, apart = (out[0], out.offsets) if isinstance(out, Peers) else (out, None)
        tables, sums = self._tables(layout, first.device), source[1] > 0
        with torch.cuda.device_of(first):
            if tables.spans is not None:
                form = self._form.tile(TILE)
                arguments = *source, residual, tables.sums, tables.spans, sums, form
                add_magnitudes[(len(tables.spans),)](*arguments, **form.options())
            for form, table in tables.encode:
                where = residual, first, apart, table
                arguments = *source, *where, tables.sums, finite, sums, form
                encode_rows[(len(table),)](*arguments, **form.options(sums))

    def _tables(self, layout: MessageLayout, device: torch.device) -> Tables:
        """Return the programs of a layout, made at the first call."""
        key = Tables, self._form, device
        if key not in layout.plans:
            layout.plans[key] = made_tables(layout, self._form, self._block, device)
        return layout.plans[key]


def made(reading: Reading) -> Triton | TritonTopK:
    """Return the kernels of a codec."""
    return TritonTopK(reading.share) if reading.kind == "largest" else Triton(reading)


class Tables(NamedTuple):
    """The programs of a layout's launches: int64 [programs, 8].

    Attributes:
        spans: of `add_magnitudes`, a program each; None: no row is shared by programs.
        sums: float64 [spans], what these find.
    """

    encode: list[tuple[Form, Tensor]]
    decode: list[tuple[Form, Tensor]]
    spans: Tensor | None
    sums: Tensor


def made_tables(layout: MessageLayout, form: Form, block: int, device: torch.device) -> Tables:
    """Divide the rows of a layout among programs."""
    encode, decode = (
        defaultdict[Form, list[RowProgram]](list),
        defaultdict[Form, list[RowProgram]](list),
    )
    spans, widths = list[RowProgram](), _widths(layout)
    for piece in layout.pieces:
        width = widths[piece.columns]
        tiles = form.tile(min(width, TILE))
        if block:
            read = form._replace(per_thread=32, block=block).tile(READ, size=READ)
            decode[read] += _blocks(layout, piece)
        else:
            read = form._replace(per_thread=32).tile(min(width, READ), size=READ)
            decode[read] += _tiles(layout, piece, read, len(spans))
        if form.shares_rows:
            encode[tiles] += _tiles(layout, piece, tiles, len(spans))
            spans += _spans(layout, piece, form)
        else:
            on_chip = piece.columns <= LONGEST
            whole = form.tile(width if on_chip else LONG_TILE, on_chip)
            even = _is_even(piece)
            encode[whole] += (RowProgram(*e, 0, even, 0) for e in layout.cut(piece, whole.rows))
    for launches in (encode, decode):
        first = next(iter(launches), form.tile(TILE))
        launches[first] += _copies(layout, first.rows * first.width)
    table = partial(torch.tensor, dtype=torch.int64, device=device)
    return Tables(
        *([(f, table(own)) for f, own in each.items() if own] for each in (encode, decode)),
        spans=table(spans) if spans else None,
        sums=torch.zeros(len(spans), dtype=torch.float64, device=device),
    )


def _widths(layout: MessageLayout) -> dict[int, int]:
    """Choose the width of a tile by the columns of its rows: as few as do not waste much."""
    values = Counter[int]()  # by width
    for piece in layout.pieces:
        values[_width(piece.columns)] += piece.rows * piece.columns
    few, joined, wider = FEW * sum(values.values()), dict[int, int](), 0
    for width in sorted(values, reverse=True):
        joined[width] = wider if wider and values[width] < few else width
        wider = joined[width]
    return {piece.columns: joined[_width(piece.columns)] for piece in layout.pieces}


def _width(columns: int) -> int:
    """Return the power of two that holds `columns` values, or LONGEST."""
    return min(LONGEST, max(64, 1 << (columns - 1).bit_length()))


def _is_even(piece: Piece) -> int:
    return int(piece.columns % 16 == 0 and piece.start % 4 == 0)


def _tiles(layout: MessageLayout, piece: Piece, form: Form, span: int) -> Iterator[RowProgram]:
    """Divide a piece among programs of one tile each."""
    spans = -(-piece.columns // form.span)
    for number, each in enumerate(layout.cut(piece, form.rows)):
        for first in range(0, piece.columns, form.width):
            yield RowProgram(*each, first, _is_even(piece), span + number * form.rows * spans)


def _blocks(layout: MessageLayout, piece: Piece) -> Iterator[RowProgram]:
    """Divide a piece of blocks among programs that take them as one row, or a part of one."""
    for each in layout.cut(piece, max(1, READ // piece.columns)):
        number = each.rows * each.columns
        even = int(number % 16 == 0 and each.start % 4 == 0)
        for first in range(0, number, READ):
            yield RowProgram(each.start, 1, number, each.header, each.payload, first, even, 0)


def _spans(layout: MessageLayout, piece: Piece, form: Form) -> Iterator[RowProgram]:
    if READINGS[form.reading] == "signs":
        for row in layout.cut(piece, 1):
            for first in range(0, piece.columns, form.span):
                yield RowProgram(*row, first, _is_even(piece), 0)


def _copies(layout: MessageLayout, size: int) -> Iterator[RowProgram]:
    for start, count, at in layout.copies:
        for first in range(0, count, size):
            number = min(size, count - first)
            yield RowProgram(start + first, 0, number, at + FLOAT_BYTES * first, 0, 0, 0, 0)
