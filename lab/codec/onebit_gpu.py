"""The kernels of 1-bit SGD's codec in Triton, for CUDA tensors: few launches for a whole bucket.

A program takes some rows of one piece, as the tables of a layout tell it, and `BYTES` times eight
values of each at once: a tile. Rows of up to LONGEST values stay in registers, so that gradient and
residual are read once. Longer rows are read again in each pass; their programs are so large that
all running ones together fit into the GPU's cache. Nothing waits for the host, and no temporary is
as large as the gradient.
"""

# Triton reads annotations as code, and takes plain values where its kernels say constexpr.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lab.codec.layout import Layout, Piece

WIDTHS = (256, 2048, 16384)  # values of a row, at most: each is a kernel of its own
TILE = 2048  # values of a program of short rows
LONGEST = 16384  # values of a row that registers hold: 16 for each of 1024 threads
LONG_TILE = 8192  # values of a longer row that are read at once
VALUES_PER_THREAD = 16
WARP = 32
FIELDS = 6  # of a program in a table: see Program


class Program(NamedTuple):
    """A program's rows: those of a Piece, of which decoding takes columns from `first` on."""

    start: int
    rows: int
    columns: int
    header: int
    payload: int
    first: int


class Shape(NamedTuple):
    """The constants of a compiled kernel.

    Attributes:
        width: values of a row that it reads at once, a power of two.
        on_chip: a row has no more.
        even: its addresses are multiples of 16 bytes.
    """

    width: int
    on_chip: bool
    even: bool

    @property
    def rows(self) -> int:
        return max(1, TILE // self.width)

    @property
    def options(self) -> dict[str, Any]:
        warps = max(4, self.rows * self.width // (VALUES_PER_THREAD * WARP))
        return {
            "EVEN": self.even,
            "ROWS": self.rows,
            "BYTES": self.width // 8,
            "num_warps": warps,
        }


class Triton:
    """See lab.codec.base.Kernels.

    Args:
        split_at_mean: the threshold of a row is its mean, not 0.
    """

    def __init__(self, split_at_mean: bool) -> None:
        self._split_at_mean = split_at_mean

    def encode(
        self, layout: Layout, values: Tensor, residual: Tensor | None, message: Tensor
    ) -> None:
        self._encode(layout, (values, 0, 0), residual, message)
        for table in tables(layout, values.device).copies:
            copy_rows[(len(table),)](
                *(values, 0, 0, message, table, 1, message), SUM=False, DECODE=False, TILE=TILE
            )

    def reduce(
        self, layout: Layout, messages: Tensor, residual: Tensor | None, out: Tensor
    ) -> None:
        sent = messages, len(messages), messages.stride(0)
        self._encode(layout, sent, residual, out)
        for table in tables(layout, out.device).copies:
            copy_rows[(len(table),)](*sent, out, table, 1, out, SUM=True, DECODE=False, TILE=TILE)

    def add_up(
        self, layout: Layout, messages: Tensor, out: Tensor, divisor: int, finite: Tensor
    ) -> None:
        sent = messages, len(messages), messages.stride(0)
        finite.fill_(True)
        with torch.cuda.device_of(out):
            for shape, table in tables(layout, out.device).decode:
                decode_rows[(len(table),)](*sent, out, table, divisor, finite, **shape.options)
            for table in tables(layout, out.device).copies:
                copy_rows[(len(table),)](
                    *(*sent, out, table, divisor, finite), SUM=True, DECODE=True, TILE=TILE
                )

    def _encode(
        self, layout: Layout, source: tuple[Tensor, int, int], residual: Tensor | None, out: Tensor
    ) -> None:
        with torch.cuda.device_of(out):
            for shape, table in tables(layout, out.device).encode:
                encode_rows[(len(table),)](
                    *(*source, residual, out, table),
                    SPLIT_AT_MEAN=self._split_at_mean,
                    SUM=source[1] > 0,
                    ON_CHIP=shape.on_chip,
                    **shape.options,
                )


class Tables(NamedTuple):
    """The programs of a layout's launches: int64 [programs, FIELDS]; of copies, at most one."""

    encode: list[tuple[Shape, Tensor]]
    decode: list[tuple[Shape, Tensor]]
    copies: list[Tensor]


def tables(layout: Layout, device: torch.device) -> Tables:
    """Return the programs of a layout, made at the first call."""
    key = Tables, device
    if key not in layout.plans:
        encode, decode = defaultdict[Shape, list[Any]](list), defaultdict[Shape, list[Any]](list)
        for piece in layout.pieces:
            _encode_programs(piece, layout, encode)
            _decode_programs(piece, layout, decode)
        copies = [
            (start + first, min(TILE, count - first), at + 4 * first)
            for start, count, at in layout.copies
            for first in range(0, count, TILE)
        ]
        layout.plans[key] = Tables(
            [(shape, torch.tensor(rows, device=device)) for shape, rows in encode.items()],
            [(shape, torch.tensor(rows, device=device)) for shape, rows in decode.items()],
            [torch.tensor(copies, device=device)] if copies else [],
        )
    return layout.plans[key]


def _encode_programs(piece: Piece, layout: Layout, found: dict[Shape, list[Any]]) -> None:
    fitting = [width for width in WIDTHS if width >= piece.columns]
    shape = Shape(fitting[0] if fitting else LONG_TILE, bool(fitting), _is_even(piece))
    found[shape] += [Program(*each, 0) for each in layout.cut(piece, shape.rows)]


def _decode_programs(piece: Piece, layout: Layout, found: dict[Shape, list[Any]]) -> None:
    width = next((width for width in WIDTHS if TILE >= width >= piece.columns), TILE)
    shape = Shape(width, piece.columns <= width, _is_even(piece))
    found[shape] += [
        Program(*each, first)
        for each in layout.cut(piece, shape.rows)
        for first in range(0, piece.columns, width)
    ]


def _is_even(piece: Piece) -> bool:
    return piece.columns % 16 == 0 and piece.start % 4 == 0


@triton.jit
def _program(table, EVEN: tl.constexpr):
    """Load this program's row of a table. EVEN tells the compiler that 16 bytes move at once."""
    own = table + tl.program_id(0) * 6
    start, rows = tl.load(own), tl.load(own + 1).to(tl.int32)
    columns, header = tl.load(own + 2).to(tl.int32), tl.load(own + 3)
    payload, first = tl.load(own + 4), tl.load(own + 5).to(tl.int32)
    if EVEN:
        start, columns = start // 4 * 4, columns // 16 * 16
        payload, first = payload // 2 * 2, first // 16 * 16
    return start, rows, columns, header, payload, first


@triton.jit
def _tile(first, rows, columns, ROWS: tl.constexpr, BYTES: tl.constexpr):
    """Return the columns of a tile [rows, bytes of bits, 8], and a mask of values that exist."""
    at = first + (tl.arange(0, BYTES)[:, None] * 8 + tl.arange(0, 8)[None, :])[None, :, :]
    return at, (at < columns) & (tl.arange(0, ROWS) < rows)[:, None, None]


@triton.jit
def _scales(message, header, ROWS: tl.constexpr):
    """Return pointers to the first of two scales of each row."""
    return (message + header).to(tl.pointer_type(tl.float32)) + 2 * tl.arange(0, ROWS)


@triton.jit
def _decoded(messages, number, stride, program, first, ROWS: tl.constexpr, BYTES: tl.constexpr):
    """Decode a tile of each of `number` messages, `stride` bytes apart, and add in their order."""
    rows, columns, header, payload = program[1], program[2], program[3], program[4]
    exists = tl.arange(0, ROWS) < rows
    byte = first // 8 + tl.arange(0, BYTES)[None, :]
    place = payload + tl.arange(0, ROWS)[:, None] * ((columns + 7) // 8) + byte
    mask = (byte * 8 < columns) & exists[:, None]
    total = tl.zeros((ROWS, BYTES, 8), tl.float32)
    for index in range(0, number):
        message = messages + index * stride
        packed = tl.load(message + place, mask=mask, other=0).to(tl.int32)
        is_upper = (packed[:, :, None] >> tl.arange(0, 8)[None, None, :]) & 1
        scales = _scales(message, header, ROWS)
        low = tl.load(scales, mask=exists, other=0.0)[:, None, None]
        high = tl.load(scales + 1, mask=exists, other=0.0)[:, None, None]
        total += tl.where(is_upper != 0, high, low)
    return total


@triton.jit
def _values(origin, program, first, SUM: tl.constexpr, ROWS: tl.constexpr, BYTES: tl.constexpr):
    """Load a tile of values to encode: a gradient or the sum of all ranks', plus the residual.

    Args:
        origin: the gradient or the messages, their number, their stride, the residual or None.
    """
    source, number, stride, residual = origin
    start, rows, columns = program[0], program[1], program[2]
    at, there = _tile(first, rows, columns, ROWS, BYTES)
    place = start + tl.arange(0, ROWS)[:, None, None] * columns + at
    if SUM:
        values = _decoded(source, number, stride, program, first, ROWS, BYTES)
        values = tl.where(there, values, 0.0)
    else:
        values = tl.load(source + place, mask=there, other=0.0)
    if residual is not None:
        values += tl.load(residual + place, mask=there, other=0.0)
    return values


@triton.jit
def _sum(values):
    """Sum each row of a tile, in double precision."""
    return tl.sum(tl.reshape(values, (values.shape[0], values.shape[1] * 8)).to(tl.float64), 1)


@triton.jit
def _side_means(
    origin,
    program,
    values,
    SUM: tl.constexpr,
    ON_CHIP: tl.constexpr,
    ROWS: tl.constexpr,
    BYTES: tl.constexpr,
):
    """Return the means of each row's negative and of its other values; 0 for an empty side."""
    rows, columns = program[1], program[2]
    lower = tl.zeros((ROWS,), tl.float64)
    upper = tl.zeros((ROWS,), tl.float64)
    num_upper = tl.zeros((ROWS,), tl.int32)
    for first in range(0, BYTES * 8 if ON_CHIP else columns, BYTES * 8):
        if not ON_CHIP:
            values = _values(origin, program, first, SUM, ROWS, BYTES)
        _, there = _tile(first, rows, columns, ROWS, BYTES)
        is_upper = (values >= 0.0) & there
        lower += _sum(tl.where(is_upper, 0.0, values))
        upper += _sum(tl.where(is_upper, values, 0.0))
        num_upper += tl.sum(tl.sum(is_upper.to(tl.int32), 2), 1)
    low = lower / tl.maximum(columns - num_upper, 1).to(tl.float64)
    high = upper / tl.maximum(num_upper, 1).to(tl.float64)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def _mean_and_deviation(
    origin,
    program,
    values,
    SUM: tl.constexpr,
    ON_CHIP: tl.constexpr,
    ROWS: tl.constexpr,
    BYTES: tl.constexpr,
):
    """Return each row's mean and its mean absolute deviation."""
    rows, columns = program[1], program[2]
    total = tl.zeros((ROWS,), tl.float64)
    distance = tl.zeros((ROWS,), tl.float64)
    for first in range(0, BYTES * 8 if ON_CHIP else columns, BYTES * 8):
        if not ON_CHIP:
            values = _values(origin, program, first, SUM, ROWS, BYTES)
        total += _sum(values)
    mean = (total / columns.to(tl.float64)).to(tl.float32)
    for first in range(0, BYTES * 8 if ON_CHIP else columns, BYTES * 8):
        if not ON_CHIP:
            values = _values(origin, program, first, SUM, ROWS, BYTES)
        _, there = _tile(first, rows, columns, ROWS, BYTES)
        distance += _sum(tl.where(there, tl.abs(values - mean[:, None, None]), 0.0))
    return mean, (distance / columns.to(tl.float64)).to(tl.float32)


# Numbers are not specialised: a 1 would become a constant, which is not a tensor.
@triton.jit(do_not_specialize=["number", "stride"])
def encode_rows(
    source,
    number,
    stride,
    residual,
    out,
    table,
    SPLIT_AT_MEAN: tl.constexpr,
    SUM: tl.constexpr,
    ON_CHIP: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    BYTES: tl.constexpr,
):
    program = _program(table, EVEN)
    start, rows, columns = program[0], program[1], program[2]
    header, payload = program[3], program[4]
    exists = tl.arange(0, ROWS) < rows
    origin = (source, number, stride, residual)
    values = _values(origin, program, 0, SUM, ROWS, BYTES)
    if SPLIT_AT_MEAN:
        split, distance = _mean_and_deviation(origin, program, values, SUM, ON_CHIP, ROWS, BYTES)
        low, high = split - distance, split + distance
    else:
        split = tl.zeros((ROWS,), tl.float32)
        low, high = _side_means(origin, program, values, SUM, ON_CHIP, ROWS, BYTES)
    scales = _scales(out, header, ROWS)
    tl.store(scales, low, mask=exists)
    tl.store(scales + 1, high, mask=exists)
    row = tl.arange(0, ROWS)
    for first in range(0, BYTES * 8 if ON_CHIP else columns, BYTES * 8):
        if not ON_CHIP:
            values = _values(origin, program, first, SUM, ROWS, BYTES)
        at, there = _tile(first, rows, columns, ROWS, BYTES)
        is_upper = (values >= split[:, None, None]) & there
        packed = tl.sum(is_upper.to(tl.int32) << tl.arange(0, 8)[None, None, :], 2)
        byte = first // 8 + tl.arange(0, BYTES)[None, :]
        place = out + payload + row[:, None] * ((columns + 7) // 8) + byte
        tl.store(place, packed.to(tl.uint8), mask=(byte * 8 < columns) & exists[:, None])
        if residual is not None:
            lost = values - tl.where(is_upper, high[:, None, None], low[:, None, None])
            tl.store(residual + start + row[:, None, None] * columns + at, lost, mask=there)


@triton.jit
def _mark(values, exists, finite):
    """Store False in `finite` if a value is not."""
    bad = ((values - values) != 0.0) & exists
    if tl.max(tl.reshape(bad.to(tl.int32), (bad.numel,)), 0) != 0:
        tl.store(finite, 0)


@triton.jit(do_not_specialize=["number", "stride", "divisor"])
def decode_rows(
    messages,
    number,
    stride,
    out,
    table,
    divisor,
    finite,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    BYTES: tl.constexpr,
):
    program = _program(table, EVEN)
    start, rows, columns, first = program[0], program[1], program[2], program[5]
    total = _decoded(messages, number, stride, program, first, ROWS, BYTES)
    at, there = _tile(first, rows, columns, ROWS, BYTES)
    mean = tl.div_rn(total, tl.zeros_like(total) + divisor.to(tl.float32))
    _mark(mean, there, finite)
    tl.store(out + start + tl.arange(0, ROWS)[:, None, None] * columns + at, mean, mask=there)


@triton.jit(do_not_specialize=["number", "stride", "divisor"])
def copy_rows(
    source,
    number,
    stride,
    out,
    table,
    divisor,
    finite,
    SUM: tl.constexpr,
    DECODE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Move values that are not encoded: into a message, from one to another, or out of one."""
    own = table + tl.program_id(0) * 3
    start, count, byte = tl.load(own), tl.load(own + 1), tl.load(own + 2)
    place = tl.arange(0, TILE)
    there = place < count
    if SUM:
        values = tl.zeros((TILE,), tl.float32)
        for index in range(0, number):
            message = (source + index * stride + byte).to(tl.pointer_type(tl.float32))
            values += tl.load(message + place, mask=there, other=0.0)
    else:
        values = tl.load(source + start + place, mask=there, other=0.0)
    if DECODE:
        values = tl.div_rn(values, tl.zeros_like(values) + divisor.to(tl.float32))
        _mark(values, there, finite)
        tl.store(out + start + place, values, mask=there)
    else:
        tl.store((out + byte).to(tl.pointer_type(tl.float32)) + place, values, mask=there)
