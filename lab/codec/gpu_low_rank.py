"""Products with factors of low rank on GPUs, in Triton: all matrices of a bucket at once.

They read and write each matrix once, and its factors, of up to four columns, from a cache. Factors
are made orthonormal by a program each. Order and rounding of sums do not depend on the device's
load, so ranks rebuild the same bits.
"""

# Triton reads annotations as code, and takes plain values where its kernels say constexpr.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lab.codec.gpu_kernels import inverse
from lab.codec.layout import Factors

WIDE = 4, 512  # rows and columns of a tile, of a program that takes whole rows
TALL = 16, 128  # the same, of a program that takes columns
SPAN, MOST_SPANS = 512, 16  # rows of a program that takes columns, at least, and parts of a matrix
ALL = 2**31  # rows or columns
LENGTH = 1024  # values of a factor that are read at once
WARPS = 4
SMALL: tl.constexpr = tl.constexpr(1e-30)  # square of a column beside which others have 1

Matrices = Sequence[tuple[int, int, int, int]]


class TileProgram(NamedTuple):
    """A part of a matrix: rows from `row` on, of columns from `column` on.

    Attributes:
        start: the matrix's first value. p, q: its factors' in their messages.
        even: rows begin at multiples of 16 bytes.
        span: the place of its part, where several are added.
    """

    start: int
    rows: int
    columns: int
    rank: int
    p: int
    q: int
    row: int
    column: int
    even: int
    span: int


FIELDS: tl.constexpr = tl.constexpr(len(TileProgram._fields))


class Plan(NamedTuple):
    """The programs of a bucket: int64 [programs, fields].

    Attributes:
        rank: the largest. alone: a program for each matrix.
        of_columns: programs that add up `span` rows. parts: float32 [spans, num_q], their sums.
    """

    rank: int
    alone: Tensor
    of_rows: Tensor
    of_columns: Tensor
    span: int
    parts: Tensor


class TritonLowRank:
    """See lab.exchange.powersgd.LowRankReference."""

    def project(
        self, factors: Factors, gradients: Tensor, residuals: Tensor | None, q: Tensor, p: Tensor
    ) -> None:
        plan = _planned(factors, p)
        arguments = gradients, residuals, q, p, plan.of_rows
        _launch(multiply_rows, plan.of_rows, *arguments, plan.rank, WIDE)

    def orthonormalise(self, factors: Factors, p: Tensor, ps: Sequence[Tensor]) -> None:
        plan = _planned(factors, p)
        width = 1 << (plan.rank - 1).bit_length()
        arguments = p, plan.alone, plan.rank, width, LENGTH // width
        _launch(orthonormalise, plan.alone, *arguments)

    def project_back(
        self, factors: Factors, matrices: Tensor, p: Tensor, q: Tensor, subtract: bool
    ) -> None:
        plan = _planned(factors, p)
        arguments = matrices, p, plan.parts, plan.of_columns, factors.num_q, plan.span
        _launch(multiply_columns, plan.of_columns, *arguments, plan.rank, TALL)
        torch.sum(plan.parts, 0, out=q.view(-1))
        if subtract:
            self._rebuild(plan, matrices, p, q, subtract)

    def rebuild(self, factors: Factors, p: Tensor, q: Tensor, out: Tensor) -> None:
        self._rebuild(_planned(factors, p), out, p, q, False)

    def _rebuild(self, plan: Plan, out: Tensor, p: Tensor, q: Tensor, subtract: bool) -> None:
        arguments = out, p, q, plan.of_rows, plan.rank, subtract
        _launch(multiply_factors, plan.of_rows, *arguments, WIDE)


made = TritonLowRank  # lab.codec.kernels.tried makes kernels by this name


def _launch(kernel: Any, table: Tensor, *arguments: Any) -> None:
    if len(table):
        with torch.cuda.device_of(table):
            kernel[(len(table),)](*arguments, num_warps=WARPS, enable_fp_fusion=False)


def _planned(factors: Factors, like: Tensor) -> Plan:
    """Return the programs of a bucket, made at the first call."""
    device = like.device
    if device not in factors.plans:
        tallest = max((matrix[1] for matrix in factors.matrices), default=1)
        span = max(SPAN, -(-tallest // MOST_SPANS))

        def table(rows: int, columns: int) -> Tensor:
            programs = list(_programs(factors.matrices, rows, columns))
            found = torch.tensor(programs, dtype=torch.int64, device=device)
            return found.view(len(programs), len(TileProgram._fields))

        factors.plans[device] = Plan(
            max((matrix[3] for matrix in factors.matrices), default=1),
            *(table(ALL, ALL), table(WIDE[0], ALL), table(span, TALL[1]), span),
            torch.zeros(-(-tallest // span), factors.num_q, device=device),
        )
    return factors.plans[device]


def _programs(matrices: Matrices, rows: int, columns: int) -> Iterator[TileProgram]:
    """Divide matrices in parts of so many rows and columns."""
    p = q = 0
    for start, height, width, rank in matrices:
        even = int(width % 16 == 0 and start % 4 == 0 and q % 4 == 0)
        for row in range(0, height, rows):
            for column in range(0, width, columns):
                own = start, height, width, rank, p, q, row, column, even, row // rows
                yield TileProgram(*own)
        p, q = p + height * rank, q + rank * width


@triton.jit
def _program(table):
    """Load this program's row of a table: see TileProgram."""
    own = table + tl.program_id(0) * FIELDS
    start, p, q = tl.load(own), tl.load(own + 4), tl.load(own + 5)
    rows, columns, rank = tl.load(own + 1), tl.load(own + 2), tl.load(own + 3).to(tl.int32)
    row, column = tl.load(own + 6).to(tl.int32), tl.load(own + 7).to(tl.int32)
    size = rows.to(tl.int32), columns.to(tl.int32), rank
    return start, size, p, q, row, column, tl.load(own + 8), tl.load(own + 9)


@triton.jit
def _aligned(program):
    """Tell the compiler that words of 16 bytes move at once, of an even program."""
    start, size, p, q, row, column, even, span = program
    size = size[0], size[1] // 16 * 16, size[2]
    return start // 4 * 4, size, p, q // 4 * 4, row, column // 16 * 16, even, span


@triton.jit
def _tile(program, row, column, TILE: tl.constexpr):
    """Return the places [rows, columns of a tile] of values in a bucket, and a mask."""
    rows, columns, _ = program[1]
    down, across = row + tl.arange(0, TILE[0]), column + tl.arange(0, TILE[1])
    place = down.to(tl.int64)[:, None] * columns + across[None, :]
    return program[0] + place, (down < rows)[:, None] & (across < columns)[None, :]


@triton.jit
def _p(p, program, row, NUMBER: tl.constexpr, ROWS: tl.constexpr):
    """Load some rows of a column of P: [ROWS]; zeros for lack of them."""
    rows, _, rank = program[1]
    down = row + tl.arange(0, ROWS)
    place = program[2] + down * rank + NUMBER
    return tl.load(p + place, mask=(down < rows) & (rank > NUMBER), other=0.0)


@triton.jit
def _q(q, program, column, NUMBER: tl.constexpr, COLUMNS: tl.constexpr):
    """Load some columns of a row of Q^T: [COLUMNS]; zeros for lack of them."""
    _, columns, rank = program[1]
    across = column + tl.arange(0, COLUMNS)
    place = program[3] + NUMBER * columns + across
    return tl.load(q + place, mask=(across < columns) & (rank > NUMBER), other=0.0)


@triton.jit
def _zeros(RANK: tl.constexpr, TILE: tl.constexpr):
    """Return sums of the shape of a tile, one for each column of a factor."""
    sums = ()
    for _ in tl.static_range(RANK):
        sums += (tl.zeros(TILE, tl.float32),)
    return sums


@triton.jit
def _store_p(p, sums, program, row, NUMBER: tl.constexpr, ROWS: tl.constexpr):
    rows, _, rank = program[1]
    down = row + tl.arange(0, ROWS)
    place = program[2] + down * rank + NUMBER
    tl.store(p + place, tl.sum(sums, 1), mask=(down < rows) & (rank > NUMBER))


@triton.jit
def _rows(gradients, residuals, q, p, program, RANK: tl.constexpr, TILE: tl.constexpr):
    """Multiply a tile's rows by Q, a tile at a time."""
    row, sums = program[4], _zeros(RANK, TILE)
    for column in range(0, program[1][1], TILE[1]):
        place, there = _tile(program, row, column, TILE)
        values = tl.load(gradients + place, mask=there, other=0.0)
        if residuals is not None:
            values += tl.load(residuals + place, mask=there, other=0.0)
            tl.store(residuals + place, values, mask=there)
        added = ()
        for number in tl.static_range(RANK):
            added += (sums[number] + values * _q(q, program, column, number, TILE[1])[None, :],)
        sums = added
    for number in tl.static_range(RANK):
        _store_p(p, sums[number], program, row, number, TILE[0])


@triton.jit
def multiply_rows(gradients, residuals, q, p, table, RANK: tl.constexpr, TILE: tl.constexpr):
    """Add gradients to residuals, and multiply the sums by Q into P."""
    program = _program(table)
    if program[6] != 0:
        _rows(gradients, residuals, q, p, _aligned(program), RANK, TILE)
    else:
        _rows(gradients, residuals, q, p, program, RANK, TILE)


@triton.jit
def _store_q(parts, sums, program, num_q, NUMBER: tl.constexpr, COLUMNS: tl.constexpr):
    _, columns, rank = program[1]
    across = program[5] + tl.arange(0, COLUMNS)
    place = program[7] * num_q + program[3] + NUMBER * columns + across
    tl.store(parts + place, tl.sum(sums, 0), mask=(across < columns) & (rank > NUMBER))


@triton.jit
def _columns(matrices, p, parts, program, num_q, span, RANK: tl.constexpr, TILE: tl.constexpr):
    """Multiply P^T by a tile's columns, a tile of at most `span` rows at a time."""
    first, column, sums = program[4], program[5], _zeros(RANK, TILE)
    for row in range(first, tl.minimum(first + span, program[1][0]), TILE[0]):
        place, there = _tile(program, row, column, TILE)
        values = tl.load(matrices + place, mask=there, other=0.0)
        added = ()
        for number in tl.static_range(RANK):
            added += (sums[number] + values * _p(p, program, row, number, TILE[0])[:, None],)
        sums = added
    for number in tl.static_range(RANK):
        _store_q(parts, sums[number], program, num_q, number, TILE[1])


@triton.jit
def multiply_columns(
    matrices, p, parts, table, num_q, span, RANK: tl.constexpr, TILE: tl.constexpr
):
    """Multiply P^T by matrices, a part of the rows in each of `parts`."""
    program = _program(table)
    if program[6] != 0:
        _columns(matrices, p, parts, _aligned(program), num_q, span, RANK, TILE)
    else:
        _columns(matrices, p, parts, program, num_q, span, RANK, TILE)


@triton.jit
def _product(out, p, q, program, RANK: tl.constexpr, SUBTRACT: tl.constexpr, TILE: tl.constexpr):
    """Multiply a tile's rows of P by Q^T, a tile at a time."""
    row = program[4]
    for column in range(0, program[1][1], TILE[1]):
        left, right = _p(p, program, row, 0, TILE[0]), _q(q, program, column, 0, TILE[1])
        total = left[:, None] * right[None, :]
        for number in tl.static_range(1, RANK):
            left = _p(p, program, row, number, TILE[0])
            total += left[:, None] * _q(q, program, column, number, TILE[1])[None, :]
        place, there = _tile(program, row, column, TILE)
        if SUBTRACT:
            total = tl.load(out + place, mask=there, other=0.0) - total
        tl.store(out + place, total, mask=there)


@triton.jit
def multiply_factors(
    out, p, q, table, RANK: tl.constexpr, SUBTRACT: tl.constexpr, TILE: tl.constexpr
):
    """Multiply P Q^T into `out`, or subtract it from there."""
    program = _program(table)
    if program[6] != 0:
        _product(out, p, q, _aligned(program), RANK, SUBTRACT, TILE)
    else:
        _product(out, p, q, program, RANK, SUBTRACT, TILE)


@triton.jit
def _block(p, first, rows, rank, scale, WIDTH: tl.constexpr, LENGTH: tl.constexpr):
    """Load some rows of a factor, scaled: places, mask and values [LENGTH, WIDTH]."""
    row, column = first + tl.arange(0, LENGTH), tl.arange(0, WIDTH)
    place = row[:, None] * rank + column[None, :]
    there = (row < rows)[:, None] & (column < rank)[None, :]
    return place, there, tl.load(p + place, mask=there, other=0.0) * scale


@triton.jit
def _picked(row, NUMBER: tl.constexpr, WIDTH: tl.constexpr):
    return tl.sum(tl.where(tl.arange(0, WIDTH) == NUMBER, row, 0.0), 0)


@triton.jit
def _scale(p, rows, rank, WIDTH: tl.constexpr, LENGTH: tl.constexpr):
    """Return a number that makes a factor's largest magnitude about 1."""
    largest = tl.zeros((LENGTH, WIDTH), tl.float32)
    for first in range(0, rows, LENGTH):
        largest = tl.maximum(largest, tl.abs(_block(p, first, rows, rank, 1.0, WIDTH, LENGTH)[2]))
    return 1.0 / tl.maximum(tl.max(tl.max(largest, 1), 0), 1e-37)


@triton.jit
def _reflect(p, rows, rank, scale, NUMBER: tl.constexpr, WIDTH: tl.constexpr, LENGTH: tl.constexpr):
    """Turn column NUMBER into one of the triangular factor, and replace it by its reflector.

    Columns before it are reflectors already, and zero above their first value. Returns 2 / v^T v.
    """
    column = tl.arange(0, WIDTH)
    products = tl.zeros((WIDTH,), tl.float64)
    for first in range(0, rows, LENGTH):
        _, _, values = _block(p, first, rows, rank, scale, WIDTH, LENGTH)
        below = (first + tl.arange(0, LENGTH) >= NUMBER)[:, None]
        own = tl.sum(tl.where(below & (column == NUMBER)[None, :], values, 0.0), 1)
        products += tl.sum(own[:, None].to(tl.float64) * values, 0)
    known = (column < rank) & (rows > NUMBER)
    top = tl.load(p + NUMBER * rank + column, mask=known, other=0.0) * scale
    square, own_top = _picked(products, NUMBER, WIDTH), _picked(top, NUMBER, WIDTH)
    none = square <= SMALL
    norm = tl.where(own_top < 0, -1.0, 1.0) * tl.sqrt(square.to(tl.float32))
    double_top = own_top.to(tl.float64)
    new_top = double_top + norm.to(tl.float64)
    squares = square - double_top * double_top + new_top * new_top  # v^T v
    factor = tl.where(none, 0.0, 2.0 * inverse(tl.where(none, 1.0, squares)))
    times = factor * (products + norm.to(tl.float64) * top)
    tl.debug_barrier()  # all have read the row that is written first
    for first in range(0, rows, LENGTH):
        place, there, values = _block(p, first, rows, rank, scale, WIDTH, LENGTH)
        row = first + tl.arange(0, LENGTH)
        reflected = tl.where((row == NUMBER)[:, None] & (column == NUMBER)[None, :], norm, 0.0)
        own = tl.sum(tl.where((column == NUMBER)[None, :], values + reflected, 0.0), 1)
        own = tl.where(row >= NUMBER, own, 0.0)
        later = (column > NUMBER)[None, :] & (row >= NUMBER)[:, None]
        left = values - own[:, None] * times[None, :].to(tl.float32)
        values = tl.where(later, left, values)
        values = tl.where((column == NUMBER)[None, :], own[:, None], values)
        tl.store(p + place, values, mask=there)
    tl.debug_barrier()
    return factor


@triton.jit
def orthonormalise(p, table, RANK: tl.constexpr, WIDTH: tl.constexpr, LENGTH: tl.constexpr):
    """Replace each P by an orthonormal basis of its columns, by reflections (Householder, 1958).

    The product of reflections I - b v v^T, of which the first columns are wanted, is
    E - V W with W of as many rows as columns.
    """
    program = _program(table)
    rows, _, rank = program[1]
    p += program[2]
    scale = _scale(p, rows, rank, WIDTH, LENGTH)
    column = tl.arange(0, WIDTH)
    factors = tl.zeros((WIDTH,), tl.float64)
    for number in tl.static_range(RANK):
        by = _reflect(p, rows, rank, scale, number, WIDTH, LENGTH)
        factors = tl.where(column == number, by, factors)
        scale = 1.0
    weights = tl.zeros((WIDTH, WIDTH), tl.float64)
    for back in tl.static_range(RANK):
        weights = _weighted(p, rows, rank, factors, weights, RANK - 1 - back, WIDTH, LENGTH)
    for first_row in range(0, rows, LENGTH):
        place, there, values = _block(p, first_row, rows, rank, 1.0, WIDTH, LENGTH)
        row = first_row + tl.arange(0, LENGTH)
        basis = tl.where(row[:, None] == column[None, :], 1.0, 0.0)
        for number in tl.static_range(RANK):
            own = tl.sum(tl.where((column == number)[None, :], values, 0.0), 1)
            weight = tl.sum(tl.where((column == number)[:, None], weights, 0.0), 0)
            basis -= own[:, None] * weight[None, :].to(tl.float32)
        tl.store(p + place, basis, mask=there)


@triton.jit
def _weighted(
    p, rows, rank, factors, weights, NUMBER: tl.constexpr, WIDTH: tl.constexpr, LENGTH: tl.constexpr
):
    """Apply reflection NUMBER to E - V W: its row of W, of which later rows are known."""
    column = tl.arange(0, WIDTH)
    products = tl.zeros((WIDTH,), tl.float64)
    for first in range(0, rows, LENGTH):
        _, _, values = _block(p, first, rows, rank, 1.0, WIDTH, LENGTH)
        own = tl.sum(tl.where((column == NUMBER)[None, :], values, 0.0), 1)
        products += tl.sum(own[:, None].to(tl.float64) * values, 0)
    # Of v^T E, the first values of v, which lie [rows, rank].
    known = (column < rows) & (rank > NUMBER)
    top = tl.load(p + column * rank + NUMBER, mask=known, other=0.0)
    applied = top.to(tl.float64) - tl.sum(products[:, None] * weights, 0)
    own = (column == NUMBER)[:, None]
    return tl.where(own, _picked(factors, NUMBER, WIDTH) * applied[None, :], weights)
