"""Random-k on GPUs, in Triton: its places are drawn in the kernels, as lab.exchange.randomk says.

A program takes RANGES of the equal ranges of one parameter, so it owns the values that lie in them.
Where they begin is known when a bucket is planned; a step gives no more than a number.
"""

# Triton reads annotations as code, and takes plain values where its kernels say constexpr.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lab.codec.gpu_kernels import is_finite, quotient, reciprocal
from lab.codec.layout import Draws

VALUES = 4096  # of a program, about
READ, CLEARED = 2048, 4096  # values that are read or cleared at once
WARPS = 4
STEP: tl.constexpr = tl.constexpr(0x9E3779B97F4A7C15)
FACTOR_1: tl.constexpr = tl.constexpr(0xBF58476D1CE4E5B9)
FACTOR_2: tl.constexpr = tl.constexpr(0x94D049BB133111EB)


class RangeProgram(NamedTuple):
    """Ranges of a parameter.

    Attributes:
        start: the parameter's first value. stop: end of its values, counted from there.
        sent: place of the program's first value in the message.
        ranges, range: of the parameter, and the first of the program.
        edge, rest: range * stop divided by ranges: the first value, and what remains.
        width, more: the same of stop itself.
        end: of the program's values.
        key: of the parameter's draw.
    """

    start: int
    stop: int
    sent: int
    ranges: int
    range: int
    edge: int
    rest: int
    width: int
    more: int
    end: int
    key: int


FIELDS: tl.constexpr = tl.constexpr(len(RangeProgram._fields))


class TritonRandomK:
    """See lab.exchange.randomk.RandomKReference."""

    def encode(
        self,
        draws: Draws,
        gradients: Tensor,
        residuals: Tensor | None,
        message: Tensor,
        probe: Tensor,
    ) -> None:
        table, ranges = _planned(draws, message.device)
        if len(table):
            with torch.cuda.device_of(message):
                arguments = gradients, residuals, message, probe, table, draws.seed
                take_drawn[(len(table),)](*arguments, ranges, READ, num_warps=WARPS)

    def decode(self, draws: Draws, message: Tensor, out: Tensor, divisor: int) -> None:
        table, ranges = _planned(draws, message.device)
        if len(table):
            with torch.cuda.device_of(message):
                arguments = message, out, table, draws.seed, divisor
                put_drawn[(len(table),)](*arguments, ranges, CLEARED, num_warps=WARPS)


made = TritonRandomK  # lab.codec.kernels.tried makes kernels by this name


def _planned(draws: Draws, device: torch.device) -> tuple[Tensor, int]:
    """Return a bucket's programs, int64 [programs, fields], and how many ranges each takes."""
    if device not in draws.plans:
        values, sent = max(1, sum(draws.sizes)), max(1, sum(draws.counts))
        ranges = 1 << min(11, max(4, (VALUES * sent // values).bit_length() - 1))
        programs = list(_programs(draws, ranges))
        draws.plans[device] = torch.tensor(programs, dtype=torch.int64, device=device), ranges
    return draws.plans[device]


def _programs(draws: Draws, ranges: int) -> Iterator[RangeProgram]:
    starts, places = (accumulate(each, initial=0) for each in (draws.sizes, draws.counts))
    each = zip(starts, draws.sizes, places, draws.counts, draws.keys.tolist(), strict=False)
    for start, size, place, count, key in each:
        for first in range(0, count, ranges):
            edge, rest = divmod(first * size, count)
            end = min(first + ranges, count) * size // count
            program = start, size, place + first, count, first, edge, rest
            yield RangeProgram(*program, *divmod(size, count), end, key)


@triton.jit
def _places(own, seed, RANGES: tl.constexpr):
    """Return the places that are drawn of a program's ranges, int64 [RANGES], and a mask."""
    first, number = tl.load(own + 4), tl.arange(0, RANGES)
    low, width = _edges(own, number)
    z = first.to(tl.uint64) * STEP + (tl.load(own + 10) ^ seed).to(tl.uint64)
    z += number.to(tl.uint32).to(tl.uint64) * STEP
    z = (z ^ (z >> 30)) * FACTOR_1
    z = (z ^ (z >> 27)) * FACTOR_2
    drawn = ((z ^ (z >> 31)) >> 32).to(tl.uint32)
    within = tl.umulhi(drawn, width.to(tl.uint32))
    return tl.load(own + 5) + (low + within.to(tl.int32)), number < tl.load(own + 3) - first


@triton.jit
def _edges(own, number):
    """Return where ranges begin after the program's first value, and their widths: int32.

    (rest + number * more) / ranges is small, so that a quotient of float32 is off by one at most:
    integers of 64 bits have no division of their own.
    """
    ranges, rest = tl.load(own + 3).to(tl.int32), tl.load(own + 6)
    width, more = tl.load(own + 7).to(tl.int32), tl.load(own + 8).to(tl.int32)
    whole = rest + number.to(tl.int64) * more.to(tl.int64)
    quotient = (whole.to(tl.float32) * (1.0 / ranges.to(tl.float32))).to(tl.int32)
    left = (whole - quotient.to(tl.int64) * ranges.to(tl.int64)).to(tl.int32)
    over = (left >= ranges).to(tl.int32) - (left < 0).to(tl.int32)
    left -= over * ranges
    return number * width + quotient + over, width + (left >= ranges - more).to(tl.int32)


# Numbers are not specialised: a 1 would become a constant, and a seed is another in each step.
@triton.jit(do_not_specialize=["seed"])
def take_drawn(
    gradients, residuals, message, probe, table, seed, RANGES: tl.constexpr, TILE: tl.constexpr
):
    """Take drawn values out of gradients + residuals, which stay there; mark what is not finite."""
    own = table + tl.program_id(0) * FIELDS
    start, sent, end = tl.load(own), tl.load(own + 2), tl.load(own + 9)
    place, drawn = _places(own, seed, RANGES)
    taken = tl.load(gradients + start + place, mask=drawn, other=0.0)
    if residuals is not None:
        taken += tl.load(residuals + start + place, mask=drawn, other=0.0)
    tl.store(message + sent + tl.arange(0, RANGES), taken, mask=drawn)
    tl.debug_barrier()  # all threads have read what others overwrite
    first = tl.load(own + 5)
    num_values = (end - first).to(tl.int32)
    for further in range(0, num_values, TILE):
        at = further + tl.arange(0, TILE)
        there = at < num_values
        values = tl.load(gradients + start + first + at, mask=there, other=0.0)
        if residuals is not None:
            values += tl.load(residuals + start + first + at, mask=there, other=0.0)
            tl.store(residuals + start + first + at, values, mask=there)
        if not is_finite(values):
            tl.store(probe, float("nan"))
    if residuals is not None:
        tl.debug_barrier()  # sums are stored, of which these are none
        tl.store(residuals + start + place, 0.0, mask=drawn)


@triton.jit(do_not_specialize=["seed", "divisor"])
def put_drawn(message, out, table, seed, divisor, RANGES: tl.constexpr, TILE: tl.constexpr):
    """Put sums over `divisor` at their places in `out`, and zeros elsewhere."""
    own = table + tl.program_id(0) * FIELDS
    start, sent, end = tl.load(own), tl.load(own + 2), tl.load(own + 9)
    first = tl.load(own + 5)
    num_values = (end - first).to(tl.int32)
    for further in range(0, num_values, TILE):
        at = further + tl.arange(0, TILE)
        tl.store(out + start + first + at, 0.0, mask=at < num_values)
    place, drawn = _places(own, seed, RANGES)
    values = tl.load(message + sent + tl.arange(0, RANGES), mask=drawn, other=0.0)
    tl.debug_barrier()  # zeros are stored
    number = divisor.to(tl.float32) + tl.zeros_like(values)
    mean = quotient(values, -number, reciprocal(number))  # of infinity, not a number
    tl.store(out + start + place, mean, mask=drawn)
