"""Kernels of codecs in Triton: see lab.codec.gpu, which launches them and has the words used here.

`FORM` is a Form, `program` a Program; `origin` is what is encoded: a gradient, or messages to sum,
their number and how far apart they are (see _message); and the residual, or None. `target` is where
a message goes: the first of as many as are summed, and how far these are apart, or None for one.
"""

# Where a constant decides, `elif` follows even a return: Triton then leaves the other branches out.
# Triton reads annotations as code, and takes plain values where its kernels say constexpr.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

SIDES, MEAN, SIGNS, LEVELS, FLOAT8, BFLOAT16, FLOAT16 = map(tl.constexpr, range(7))  # READINGS
COPIED: tl.constexpr = tl.constexpr(512)  # values that travel as they are, read at once
NEGATIVE: tl.constexpr = tl.constexpr(-0x80000000)  # zero, as the bits of a float32
TINY: tl.constexpr = tl.constexpr(1.1754943508222875e-38)  # the smallest normal float32


@triton.jit
def divided(x, divisor):
    """Divide float32 by float32, to the nearest; see `quotient`. Infinity stays what it is."""
    by = reciprocal(divisor)
    near = quotient(x, -divisor + tl.zeros_like(x), by + tl.zeros_like(x))
    return tl.where(near == near, near, x * by)


@triton.jit
def quotient(x, negative, by):
    """Divide x by a number, given as -number and its reciprocal, to the nearest, without a call.

    A product with the reciprocal is off by one bit at most, and what it leaves of x, which is
    exact, tells which way (Markstein, Computation of elementary functions on the IBM RISC
    System/6000 processor, 1990). It holds for results above the smallest normal numbers.
    """
    near = x * by
    return tl.fma(tl.fma(near, negative, x), by, near)


@triton.jit
def reciprocal(x):
    """Return 1 / x of float32, to the nearest."""
    near = 1.0 / x
    return tl.fma(tl.fma(-near, x, near * 0.0 + 1.0), near, near)


@triton.jit
def inverse(x):
    """Return 1 / x of float64 in the range of float32, to its last bits, without a call."""
    near = (1.0 / x.to(tl.float32)).to(tl.float64)
    near = near * (2.0 - x * near)
    return near * (2.0 - x * near)


@triton.jit
def is_finite(values):
    """Return whether all values are, those of any shape."""
    return tl.sum(tl.reshape(values * 0.0, (values.numel,)), 0) == 0.0


@triton.jit
def _program(table, FORM: tl.constexpr):
    """Load this program's row of a table: see Program; and the units of a row's payload."""
    own = table + tl.program_id(0) * 8
    start, rows = tl.load(own), tl.load(own + 1).to(tl.int32)
    columns, header = tl.load(own + 2).to(tl.int32), tl.load(own + 3)
    payload, first = tl.load(own + 4), tl.load(own + 5).to(tl.int32)
    units = (columns + FORM.per_unit - 1) // FORM.per_unit
    even, span = tl.load(own + 6), tl.load(own + 7)
    return start, rows, columns, header, payload, first, even, span, units


@triton.jit
def _aligned(program, FORM: tl.constexpr):
    """Tell the compiler that an even program's words of 16 bytes move at once."""
    start, rows, columns, header, payload, first, even, span, units = program
    columns, first = columns // 16 * 16, first // 16 * 16
    payload = payload // FORM.even_bytes * FORM.even_bytes
    units = units // (16 // FORM.per_unit) * (16 // FORM.per_unit)
    return start // 4 * 4, rows, columns, header, payload, first, even, span, units


@triton.jit
def _of_rows(value, TYPE: tl.constexpr, FORM: tl.constexpr):
    """Return a number for each row of a tile."""
    ROWS: tl.constexpr = FORM.rows
    return tl.full((ROWS,), value, TYPE)


@triton.jit
def _tile(first, rows, columns, FORM: tl.constexpr):
    """Return the columns of a tile [rows, units, values], and a mask of values that exist."""
    at = (
        first
        + (
            tl.arange(0, FORM.units)[:, None] * FORM.per_unit + tl.arange(0, FORM.per_unit)[None, :]
        )[None, :, :]
    )
    return at, (at < columns) & (tl.arange(0, FORM.rows) < rows)[:, None, None]


@triton.jit
def _units(program, first, FORM: tl.constexpr):
    """Return the places of a tile's units after the payload's first, and a mask."""
    rows, units, row = program[1], program[8], tl.arange(0, FORM.rows)[:, None]
    unit = first // FORM.per_unit + tl.arange(0, FORM.units)[None, :]
    return row * units + unit, (unit < units) & (row < rows)


@triton.jit
def _scale(message, program, first, NUMBER: tl.constexpr, FORM: tl.constexpr):
    """Load one of the numbers that rows have in their headers: [rows, 1]; 0: there is none.

    Where blocks follow each other in one row of a tile, it is of each unit: [1, units].
    """
    own = (message + program[3]).to(tl.pointer_type(tl.float32)) + NUMBER
    if FORM.scales <= NUMBER:
        return _of_rows(0, tl.float32, FORM)[:, None]
    # Without `else` several shapes would be returned.
    elif FORM.block > 0:  # noqa: RET505
        column = first + tl.arange(0, FORM.units)[None, :] * FORM.per_unit
        place = (column.to(tl.uint32) // FORM.block).to(tl.int32)
        return tl.load(own + FORM.scales * place, mask=column < program[2], other=0.0)
    else:
        row = tl.arange(0, FORM.rows)[:, None]
        return tl.load(own + FORM.scales * row, mask=row < program[1], other=0.0)


@triton.jit
def _read(codes, one, two, FORM: tl.constexpr):
    """Return the values of codes [rows, units, values], by numbers [rows or 1, units or 1]."""
    one, two = one[:, :, None], two[:, :, None]
    if FORM.reading == SIDES or FORM.reading == MEAN:
        return tl.where(codes != 0, two, one)
    if FORM.reading == SIGNS:
        return tl.where(codes != 0, -one, one)
    if FORM.reading == LEVELS:
        return codes.to(tl.float32) * two + one
    if FORM.reading == FLOAT8:
        return _from_float8(codes) * one
    if FORM.reading == BFLOAT16:
        return (codes << 16).to(tl.float32, bitcast=True)
    return codes.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _over(values, scale):
    """Divide values [rows, units, values] by the scales of rows, [rows, 1, 1]."""
    by = reciprocal(scale)
    return quotient(values, -scale + tl.zeros_like(values), by + tl.zeros_like(values))


@triton.jit
def _codes(values, there, split, one, two, FORM: tl.constexpr):
    """Return the codes of values [rows, units, values], 0 where there is none."""
    split, one, two = split[:, None, None], one[:, None, None], two[:, None, None]
    if FORM.reading == SIDES or FORM.reading == MEAN:
        return ((values >= split) & there).to(tl.int32)
    if FORM.reading == SIGNS:
        return ((values.to(tl.int32, bitcast=True) < 0) & there).to(tl.int32)
    if FORM.reading == LEVELS:  # a conversion truncates; with the half added it rounds
        level = _over(values - one, two) + 0.5
        return tl.where(there, level.to(tl.int32), 0)
    if FORM.reading == FLOAT8:
        return tl.where(there, _to_float8(_over(values, one)), 0)
    if FORM.reading == BFLOAT16:
        return _to_bfloat16(values)
    return values.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.int32)


@triton.jit
def _to_bfloat16(x):
    """Round to bfloat16, to nearest and ties to even, as integers from 0 to 65535."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x != x, 0x7FC0, rounded) & 0xFFFF


@triton.jit
def _to_float8(x):
    """Round to float8_e4m3fn, to nearest and ties to even, as integers from 0 to 255.

    Only GPUs since sm_89 have instructions for it.
    """
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # Exponents have a bias of 7, not 127, and three bits of 23 follow.
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 values are multiples of 2^-9: the last bits of a number near 2^23.
    small = (tl.abs(x) * 512.0 + 8388608.0).to(tl.int32, bitcast=True) & 15
    code = tl.where(size < (121 << 23), small, normal)
    return tl.where(x != x, 0x7F, code) | ((bits >> 24) & 0x80)


@triton.jit
def _from_float8(code):
    """Read integers of `_to_float8`, but 0x7F as 480: the scale of its row is not finite then."""
    # Exponents have a bias of 7, not 127; so products are exact, even of denormal numbers.
    bits = ((code << 24) >> 4) & -0x78100000
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120


@triton.jit
def _payload(message, program, FORM: tl.constexpr):
    """Return a pointer to a payload's first unit."""
    own = message + program[4]
    if FORM.unit_bytes == 4:
        return own.to(tl.pointer_type(tl.uint32))
    # Without `else` several types would be returned.
    elif FORM.unit_bytes == 2:  # noqa: RET505
        return own.to(tl.pointer_type(tl.uint16))
    else:
        return own


@triton.jit
def _shifts(FORM: tl.constexpr):
    """Return the lowest bit of each code of a unit."""
    return (tl.arange(0, FORM.per_unit) * (8 * FORM.unit_bytes // FORM.per_unit))[None, None, :]


@triton.jit
def _loaded(message, program, first, FORM: tl.constexpr):
    """Load a tile's codes of one message."""
    place, there = _units(program, first, FORM)
    units = tl.load(_payload(message, program, FORM) + place, mask=there, other=0)
    if FORM.per_unit == 1:
        return units.to(tl.int32)[:, :, None]
    mask = (1 << (8 * FORM.unit_bytes // FORM.per_unit)) - 1
    return (units.to(tl.int32, bitcast=FORM.unit_bytes == 4)[:, :, None] >> _shifts(FORM)) & mask


@triton.jit
def _message(first, apart, index):
    """Return one of several messages, `apart` bytes from each other.

    Args:
        apart: a number; or an address of as many distances from `first`, which are whole words.
    """
    # Without `else` what follows would be compiled, too.
    if apart is None:
        return first
    elif apart.dtype.is_ptr():  # noqa: RET505
        return first + tl.load(apart + index) // 16 * 16
    else:
        return first + index * (apart // 16 * 16)  # lines are multiples of 16 bytes


@triton.jit
def _store(codes, target, program, first, FORM: tl.constexpr):
    """Store a tile's codes in a message, or in each of several."""
    out, number, apart = target
    place, there = _units(program, first, FORM)
    if FORM.per_unit == 1:
        units = tl.reshape(codes, (FORM.rows, FORM.units))
    else:
        units = tl.sum(codes << _shifts(FORM), 2)
    for index in range(0, 1 if apart is None else number):
        own = _payload(_message(out, apart, index), program, FORM)
        tl.store(own + place, units.to(own.dtype.element_ty), mask=there)


@triton.jit
def _store_header(one, two, stores, target, program, FORM: tl.constexpr):
    """Store the numbers of each row in a message, or in each of several."""
    out, number, apart = target
    for index in range(0, 1 if apart is None else number):
        own = (_message(out, apart, index) + program[3]).to(tl.pointer_type(tl.float32))
        own += FORM.scales * tl.arange(0, FORM.rows)
        if FORM.scales > 0:
            tl.store(own, one, mask=stores)
        if FORM.scales > 1:
            tl.store(own + 1, two, mask=stores)


@triton.jit
def _store_copied(values, there, place, target, program):
    """Store values that travel as they are in a message, or in each of several."""
    out, number, apart = target
    for index in range(0, 1 if apart is None else number):
        own = (_message(out, apart, index) + program[3]).to(tl.pointer_type(tl.float32))
        tl.store(own + place, values, mask=there)


@triton.jit
def _decoded(messages, number, stride, program, first, FORM: tl.constexpr):
    """Decode a tile of each of `number` messages, and add in their order."""
    ROWS: tl.constexpr = FORM.rows
    UNITS: tl.constexpr = FORM.units
    PER: tl.constexpr = FORM.per_unit
    # Negative zero changes no sum, not even the sign of one that is zero.
    total = tl.full((ROWS, UNITS, PER), NEGATIVE, tl.int32).to(tl.float32, bitcast=True)
    for index in range(0, number):
        message = _message(messages, stride, index)
        codes = _loaded(message, program, first, FORM)
        one = _scale(message, program, first, 0, FORM)
        two = _scale(message, program, first, 1, FORM)
        total += _read(codes, one, two, FORM)
    return total


@triton.jit
def _values(origin, program, first, SUM: tl.constexpr, FORM: tl.constexpr):
    """Load a tile of values to encode, with the residual."""
    source, number, stride, residual = origin
    start, rows, columns = program[0], program[1], program[2]
    at, there = _tile(first, rows, columns, FORM)
    place = start + tl.arange(0, FORM.rows)[:, None, None] * columns + at
    if SUM:
        values = _decoded(source, number, stride, program, first, FORM)
        values = tl.where(there, values, 0.0)
    else:
        values = tl.load(source + place, mask=there, other=0.0)
    if residual is not None:
        values += tl.load(residual + place, mask=there, other=0.0)
    return values


@triton.jit
def _flat(values, FORM: tl.constexpr):
    return tl.reshape(values, (FORM.rows, FORM.width))


@triton.jit
def _sum(values, FORM: tl.constexpr):
    """Sum each row of a tile, in double precision."""
    return tl.sum(_flat(values, FORM).to(tl.float64), 1)


@triton.jit
def _two_sums(origin, program, values, split, SUM: tl.constexpr, FORM: tl.constexpr):
    """Return the sums of each row's values below `split` and of the others, and their number."""
    rows, columns = program[1], program[2]
    lower = _of_rows(0, tl.float64, FORM)
    upper = _of_rows(0, tl.float64, FORM)
    num_upper = _of_rows(0, tl.int32, FORM)
    for first in range(0, FORM.width if FORM.on_chip else columns, FORM.width):
        if not FORM.on_chip:
            values = _values(origin, program, first, SUM, FORM)
        _, there = _tile(first, rows, columns, FORM)
        is_upper = (values >= split[:, None, None]) & there
        upper += _sum(tl.where(is_upper, values, 0.0), FORM)
        lower += _sum(tl.where(is_upper, 0.0, values), FORM)
        num_upper += tl.sum(_flat(is_upper.to(tl.int32), FORM), 1)
    return lower, upper, num_upper


@triton.jit
def _deviation(origin, program, values, mean, SUM: tl.constexpr, FORM: tl.constexpr):
    """Return each row's sum of distances from its mean."""
    rows, columns = program[1], program[2]
    total = _of_rows(0, tl.float64, FORM)
    for first in range(0, FORM.width if FORM.on_chip else columns, FORM.width):
        if not FORM.on_chip:
            values = _values(origin, program, first, SUM, FORM)
        _, there = _tile(first, rows, columns, FORM)
        total += _sum(tl.where(there, tl.abs(values - mean[:, None, None]), 0.0), FORM)
    return total


@triton.jit
def _largest(values, FORM: tl.constexpr):
    """Return each row's largest magnitude, as an integer of the same order: NaN is the largest."""
    return tl.max(_flat(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, FORM), 1)


@triton.jit
def _ends(origin, program, values, SUM: tl.constexpr, FORM: tl.constexpr):
    """Return each row's smallest value, largest value, and largest magnitude.

    If one of a row's values is NaN, the first is NaN, and so is the last.
    """
    rows, columns = program[1], program[2]
    low = _of_rows(float("inf"), tl.float32, FORM)
    high = _of_rows(float("-inf"), tl.float32, FORM)
    largest = _of_rows(0, tl.int32, FORM)
    for first in range(0, FORM.width if FORM.on_chip else columns, FORM.width):
        if not FORM.on_chip:
            values = _values(origin, program, first, SUM, FORM)
        _, there = _tile(first, rows, columns, FORM)
        largest = tl.maximum(largest, _largest(values, FORM))
        if FORM.reading == LEVELS:
            # Of two numbers of which one is NaN, they return the other.
            low = tl.minimum(low, tl.min(_flat(tl.where(there, values, float("inf")), FORM), 1))
            high = tl.maximum(high, tl.max(_flat(tl.where(there, values, float("-inf")), FORM), 1))
    magnitude = largest.to(tl.float32, bitcast=True)
    return tl.where(magnitude == magnitude, low, magnitude), high, magnitude


@triton.jit
def _shared(sums, program, FORM: tl.constexpr):
    """Return each row's sum of magnitudes, of which `add_magnitudes` has found parts."""
    row, spans = tl.arange(0, FORM.rows), (program[2] + FORM.span - 1) // FORM.span
    total = _of_rows(0, tl.float64, FORM)
    for span in range(0, spans):
        own = sums + program[7] + row * spans + span
        total += tl.load(own, mask=row < program[1], other=0.0)
    return total


@triton.jit
def _numbers(origin, program, values, sums, SUM: tl.constexpr, FORM: tl.constexpr):
    """Return where each row is split, and the numbers of its header; zeros for lack of them."""
    none = _of_rows(0, tl.float32, FORM)
    count = _of_rows(0, tl.int32, FORM) + program[2]
    if FORM.reading == SIDES:
        lower, upper, num_upper = _two_sums(origin, program, values, none, SUM, FORM)
        # An empty side has the sum 0; dividing it by 1 makes its mean 0.
        low = lower * inverse(tl.maximum(count - num_upper, 1).to(tl.float64))
        high = upper * inverse(tl.maximum(num_upper, 1).to(tl.float64))
        return none, low.to(tl.float32), high.to(tl.float32)
    if FORM.reading == MEAN:
        lower, upper, _ = _two_sums(origin, program, values, none, SUM, FORM)
        mean = ((lower + upper) * inverse(count.to(tl.float64))).to(tl.float32)
        total = _deviation(origin, program, values, mean, SUM, FORM)
        distance = (total * inverse(count.to(tl.float64))).to(tl.float32)
        return mean, mean - distance, mean + distance
    if FORM.reading == SIGNS:
        total = _shared(sums, program, FORM)
        return none, (total * inverse(count.to(tl.float64))).to(tl.float32), none
    if FORM.reading == LEVELS:
        low, high, _ = _ends(origin, program, values, SUM, FORM)
        step = divided(high - low, none + (FORM.num_levels - 1))
        # Of two numbers of which one is NaN, `maximum` would return the other.
        return none, low, tl.where(step < TINY, TINY, step)
    if FORM.reading == FLOAT8:
        _, _, largest = _ends(origin, program, values, SUM, FORM)
        scale = divided(largest, none + 448.0)
        scale = tl.where(scale < TINY, TINY, scale)
        return none, scale, none
    return none, none, none


@triton.jit
def _encoded(origin, program, target, sums, SUM: tl.constexpr, FORM: tl.constexpr):
    """Encode the rows of a program, or the part of one that it takes alone."""
    start, rows, columns, begin = program[0], program[1], program[2], program[5]
    row, residual = tl.arange(0, FORM.rows), origin[3]
    values = _values(origin, program, begin, SUM, FORM)
    split, one, two = _numbers(origin, program, values, sums, SUM, FORM)
    _store_header(one, two, (row < rows) & (begin == 0), target, program, FORM)
    for further in range(0, FORM.width if FORM.on_chip else columns, FORM.width):
        first = begin + further
        if not FORM.on_chip:
            values = _values(origin, program, first, SUM, FORM)
        at, there = _tile(first, rows, columns, FORM)
        codes = _codes(values, there, split, one, two, FORM)
        _store(codes, target, program, first, FORM)
        if residual is not None:
            lost = values - _read(codes, one[:, None], two[:, None], FORM)
            place = start + row[:, None, None] * columns + at
            tl.store(residual + place, lost, mask=there)


@triton.jit
def _copied(source, number, stride, program, place, SUM: tl.constexpr):
    """Return values that travel as they are, or sums of them, and a mask of those that exist."""
    there = place < program[2]
    if SUM:
        values = tl.full(place.shape, NEGATIVE, tl.int32).to(tl.float32, bitcast=True)
        for index in range(0, number):
            message = _message(source, stride, index) + program[3]
            message = message.to(tl.pointer_type(tl.float32))
            values += tl.load(message + place, mask=there, other=0.0)
    else:
        values = tl.load(source + program[0] + place, mask=there, other=0.0)
    return values, there


@triton.jit
def _mean(out, place, there, total, divisor, finite):
    """Store totals over `divisor`, and False in `finite` if one of them is not."""
    by = reciprocal(divisor)
    mean = quotient(total, -divisor + tl.zeros_like(total), by + tl.zeros_like(total))
    tl.store(out + place, mean, mask=there)
    if not is_finite(mean):  # of infinity, `mean` is not a number
        tl.store(finite, 0)


# Numbers are not specialised: a 1 would become a constant, which is not a tensor.
@triton.jit(do_not_specialize=["number", "stride"])
def add_magnitudes(
    source, number, stride, residual, sums, table, SUM: tl.constexpr, FORM: tl.constexpr
):
    """Add up magnitudes in a span of a row, of which FORM.rows is 1."""
    program, origin = _program(table, FORM), (source, number, stride, residual)
    total = _of_rows(0, tl.float64, FORM)
    for further in range(0, FORM.span, FORM.width):
        first = program[5] + further
        values = _values(origin, program, first, SUM, FORM)
        total += _sum(tl.abs(values), FORM)
    tl.store(sums + tl.program_id(0) + tl.arange(0, FORM.rows), total)


@triton.jit(do_not_specialize=["number", "stride"])
def encode_rows(
    source,
    number,
    stride,
    residual,
    out,
    apart,
    table,
    sums,
    finite,
    SUM: tl.constexpr,
    FORM: tl.constexpr,
):
    program, origin = _program(table, FORM), (source, number, stride, residual)
    target = out, number, apart
    # The first condition is known when the kernel is compiled, the second is not.
    if finite is not None:  # noqa: SIM102
        if tl.program_id(0) == 0:
            tl.store(finite, 1)
    if program[1] == 0:
        for first in range(0, program[2], COPIED):
            place = first + tl.arange(0, COPIED)
            values, there = _copied(source, number, stride, program, place, SUM)
            _store_copied(values, there, place, target, program)
    elif program[6] != 0:
        _encoded(origin, _aligned(program, FORM), target, sums, SUM, FORM)
    else:
        _encoded(origin, program, target, sums, SUM, FORM)


@triton.jit
def _add_up(messages, number, stride, program, out, divisor, finite, FORM: tl.constexpr):
    """Decode a tile of all messages, and store its mean."""
    rows, columns, first = program[1], program[2], program[5]
    total = _decoded(messages, number, stride, program, first, FORM)
    at, there = _tile(first, rows, columns, FORM)
    place = tl.arange(0, FORM.rows)[:, None, None] * columns + at
    _mean(out + program[0], place, there, total, divisor, finite)


@triton.jit(do_not_specialize=["number", "stride", "divisor"])
def decode_rows(messages, number, stride, out, table, divisor, finite, FORM: tl.constexpr):
    program, by = _program(table, FORM), divisor.to(tl.float32)
    if program[1] == 0:
        for first in range(0, program[2], COPIED):
            place = first + tl.arange(0, COPIED)
            total, there = _copied(messages, number, stride, program, place, True)
            _mean(out + program[0], place, there, total, by, finite)
    elif program[6] != 0:
        _add_up(messages, number, stride, _aligned(program, FORM), out, by, finite, FORM)
    else:
        _add_up(messages, number, stride, program, out, by, finite, FORM)
