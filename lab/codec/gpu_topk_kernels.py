"""Kernels of top-k in Triton: see lab.codec.gpu_topk, which launches them and has their words."""

# Triton reads annotations as code, and takes plain values where its kernels say constexpr.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from lab.codec.gpu_kernels import divided, is_finite

FIELDS: tl.constexpr = tl.constexpr(9)  # of a Row


@triton.jit
def _magnitude(values):
    """Return magnitudes as integers of the same order; NaN comes after infinity."""
    return values.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _total(flags):
    return tl.sum(flags.to(tl.int32), 0)


@triton.jit
def sample_rows(values, residual, rows, limits, progress, BITS: tl.constexpr):
    """Find a row's limit, and forget what the last step counted."""
    own, limit = rows + tl.program_id(0) * FIELDS, limits + tl.program_id(0) * 5
    start, columns, rank = tl.load(own), tl.load(own + 1), tl.load(own + 4).to(tl.int32)
    at = tl.arange(0, 1 << BITS)
    place = at.to(tl.int64)
    there = place < columns
    if columns > (1 << BITS):
        # One value of each of as many ranges, at a place that no pattern of a row agrees with.
        drawn = at.to(tl.uint32) * 0x9E3779B1
        drawn = (drawn ^ (drawn >> 15)) * 0x85EBCA77
        drawn ^= drawn >> 13
        width = (columns >> BITS).to(tl.uint32)
        place = (place * columns >> BITS) + tl.umulhi(drawn, width + tl.zeros_like(drawn))
    sums = tl.load(values + start + place, mask=there, other=0.0)
    if residual is not None:
        sums += tl.load(residual + start + place, mask=there, other=0.0)
    magnitudes = tl.where(there, _magnitude(sums), -1)
    found = tl.where(rank > (1 << BITS), -1, 0)
    for bit in range(0, 31):
        higher = found | (1 << (30 - bit))
        found = tl.where(_total(magnitudes >= higher) >= rank, higher, found)
    tl.store(limit, found)
    tl.store(limit + 1, 0)
    tl.store(limit + 2, 0)
    first, tiles = tl.load(own + 7), tl.load(own + 8).to(tl.int32)
    for tile in range(0, tiles, 1 << BITS):
        tl.store(progress + first + tile + at, 0, mask=tile + at < tiles)


@triton.jit
def _copy(values, message, first, number, at, TILE: tl.constexpr):
    """Copy values that travel as they are."""
    place = tl.arange(0, TILE)
    there = place < number
    out = (message + at).to(tl.pointer_type(tl.float32))
    tl.store(out + place, tl.load(values + first + place, mask=there, other=0.0), mask=there)


@triton.jit
def collect_largest(
    values, residual, message, rows, tiles, limits, counts, copied, finite, TILE: tl.constexpr
):
    """Add the gradient to the residual, and copy what exceeds the limit of its row."""
    tile = tl.program_id(0)
    part = tiles + tile * 4
    row, first, number = tl.load(part), tl.load(part + 1), tl.load(part + 2).to(tl.int32)
    # The first condition is known when the kernel is compiled, the second is not.
    if finite is not None:  # noqa: SIM102
        if tile == 0:
            tl.store(finite, 1)
    at = tl.load(part + 3)
    if row < 0:
        _copy(values, message, first, number, at, TILE)
    else:
        own, limit = rows + row * FIELDS, limits + row * 5
        least, start = tl.load(limit), tl.load(own) + first
        out = limit, counts + 2 * tile, copied
        room = tl.load(own + 5), tl.load(own + 6).to(tl.int32), first.to(tl.int32)
        if (at != 0) & (number == TILE):
            _collect(values, residual, start // 4 * 4, least, out, room, TILE)
        else:
            _collect_rest(values, residual, start, number, least, out, room, TILE // 4)


@triton.jit
def _claim(out, total, equal):
    """Count a tile's values above the limit and equal to it, and return the place of its copies."""
    limit, count, _ = out
    base = tl.atomic_add(limit + 1, total, sem="relaxed")
    tl.atomic_add(limit + 2, equal, sem="relaxed")
    tl.store(count, base)
    tl.store(count + 1, total)
    return base


@triton.jit
def _pair(values, place):
    return values.to(tl.int32, bitcast=True).to(tl.int64) << 32 | place.to(tl.int64)


@triton.jit
def _collect(values, residual, start, least, out, room, TILE: tl.constexpr):
    """Collect from a whole tile, whose words of 16 bytes move at once."""
    # Four values of a thread are counted by itself, and threads thereafter.
    at = tl.arange(0, TILE // 4)[:, None] * 4 + tl.arange(0, 4)[None, :]
    sums = tl.load(values + start + at)
    if residual is not None:
        sums += tl.load(residual + start + at)
        tl.store(residual + start + at, sums)
    magnitudes = _magnitude(sums)
    above = (magnitudes > least).to(tl.int32)
    of_threads = tl.sum(above, 1)
    through = (tl.cumsum(of_threads, 0) - of_threads)[:, None] + tl.cumsum(above, 1)
    total, equal = tl.sum(of_threads, 0), tl.sum(tl.sum((magnitudes == least).to(tl.int32), 1), 0)
    base = _claim(out, total, equal)
    if base + total <= room[1]:
        to = out[2] + (room[0] + base - 1)
        tl.store(to + through, _pair(sums, room[2] + at), mask=above != 0)


@triton.jit
def _collect_rest(values, residual, start, number, least, out, room, BLOCK: tl.constexpr):
    """Collect from any tile, whose sums are read again to be copied."""
    total, equal = least * 0, least * 0
    for first in range(0, number, BLOCK):
        at = first + tl.arange(0, BLOCK)
        sums = tl.load(values + start + at, mask=at < number, other=0.0)
        if residual is not None:
            sums += tl.load(residual + start + at, mask=at < number, other=0.0)
            tl.store(residual + start + at, sums, mask=at < number)
        magnitudes = tl.where(at < number, _magnitude(sums), -2)
        total, equal = total + _total(magnitudes > least), equal + _total(magnitudes == least)
    base = _claim(out, total, equal)
    if base + total <= room[1]:
        to = out[2] + (room[0] + base - 1)
        for first in range(0, number, BLOCK):
            at = first + tl.arange(0, BLOCK)
            stored = values if residual is None else residual
            sums = tl.load(stored + start + at, mask=at < number, other=0.0)
            above = (tl.where(at < number, _magnitude(sums), -2) > least).to(tl.int32)
            tl.store(to + tl.cumsum(above, 0), _pair(sums, room[2] + at), mask=above != 0)
            to += tl.sum(above, 0)


@triton.jit
def _read(origin, at, there):
    """Return values and their places in a row, of its copies or of its sums."""
    sums, first, copied, from_copies = origin
    if from_copies:
        pairs = tl.load(copied + at, mask=there, other=0)
        values = (pairs >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        place = pairs.to(tl.int32)
    else:
        values = tl.load(sums + first + at, mask=there, other=0.0)
        place = first + at
    return values, place


@triton.jit
def _digit(origin, number, known, above, shift, left, BLOCK: tl.constexpr, BITS: tl.constexpr):
    """Find a digit of the left-th largest magnitude, and its place among those that share it.

    Bits from `above` on are known, and `left` counts those that begin alike; the digit's lowest bit
    is `shift`.
    """
    digits = tl.arange(0, 1 << BITS)
    histogram = tl.zeros((1 << BITS,), tl.int32)
    for first in range(0, number, BLOCK):
        at = first + tl.arange(0, BLOCK)
        values, _ = _read(origin, at, at < number)
        magnitudes = _magnitude(values)
        alike = (at < number) & (((magnitudes ^ known) >> shift) >> (above - shift) == 0)
        digit = (magnitudes >> shift) & ((1 << (above - shift)) - 1)
        histogram += tl.histogram(digit, 1 << BITS, mask=alike)
    as_large = tl.sum(histogram, 0) - tl.cumsum(histogram, 0) + histogram
    digit = _total(as_large >= left) - 1
    left -= tl.sum(tl.where(digits == digit, as_large - histogram, 0), 0)
    return known | (digit << shift), left


@triton.jit
def find_last(sums, rows, limits, copied, BLOCK: tl.constexpr, BITS: tl.constexpr):
    """Find the smallest magnitude that a row sends, and how many equal to it."""
    own, limit = rows + tl.program_id(0) * FIELDS, limits + tl.program_id(0) * 5
    columns, sent = tl.load(own + 1).to(tl.int32), tl.load(own + 2).to(tl.int32)
    least, above, equal = tl.load(limit), tl.load(limit + 1), tl.load(limit + 2)
    if (above < sent) & (above + equal >= sent):
        tl.store(limit + 3, least)
        tl.store(limit + 4, sent - above)
    else:
        from_copies = (above >= sent) & (above <= tl.load(own + 6))
        copies = tl.load(own + 5)
        origin = sums + tl.load(own), least * 0, copied + copies, from_copies
        number = tl.where(from_copies, above, columns)
        known, left, shift = least * 0, sent, least * 0 + 31
        for _ in range(0, (31 + BITS - 1) // BITS):
            higher, shift = shift, tl.maximum(shift - BITS, 0)
            known, left = _digit(origin, number, known, higher, shift, left, BLOCK, BITS)
        tl.store(limit + 3, known)
        tl.store(limit + 4, left)


@triton.jit
def _look_back(progress, tile, first, own):
    """Return the sum of what programs from `first` on have counted before this one's `own`.

    A program's word holds, in its two highest bits, 0: nothing; 1: what it has counted; 2: that and
    all before. A word is written and read as a whole, so no order of other memory is asked for.
    """
    counted = own * 0
    if tile > first:
        tl.atomic_xchg(progress + tile, own | (own * 0 + 1 << 62), sem="relaxed")
    at = tile - 1
    while at >= first:
        word = tl.atomic_add(progress + at, own * 0, sem="relaxed")
        while word == 0:
            word = tl.atomic_add(progress + at, own * 0, sem="relaxed")
        counted += word & 0x3FFFFFFFFFFFFFFF
        at = tl.where(word < 0, first - 1, at - 1)
    tl.atomic_xchg(progress + tile, (counted + own) | (own * 0 + 2 << 62), sem="relaxed")
    return counted


@triton.jit
def write_largest(
    sums, residual, message, rows, tiles, limits, counts, copied, progress, BLOCK: tl.constexpr
):
    """Write a tile's share of the largest values and their places, and take them out of sums."""
    tile = tl.program_id(0)
    row, begin = tl.load(tiles + tile * 4), tl.load(tiles + tile * 4 + 1).to(tl.int32)
    own, limit = rows + row * FIELDS, limits + row * 5
    above, last, equal = tl.load(limit + 1), tl.load(limit + 3), tl.load(limit + 4)
    copies = tl.load(own + 5) + tl.load(counts + 2 * tile)
    from_copies = (last > tl.load(limit)) & (above <= tl.load(own + 6))
    start, sent = tl.load(own), tl.load(own + 2)
    origin = sums + start, begin, copied + copies, from_copies
    in_copies, in_tile = tl.load(counts + 2 * tile + 1), tl.load(tiles + tile * 4 + 2).to(tl.int32)
    number = tl.where(from_copies, in_copies, in_tile)
    # Of larger magnitudes in the higher half of a word, of equal ones in the lower.
    counted = start * 0
    for first in range(0, number, BLOCK):
        at = first + tl.arange(0, BLOCK)
        values, _ = _read(origin, at, at < number)
        magnitudes = tl.where(at < number, _magnitude(values), -1)
        larger, alike = _total(magnitudes > last), _total(magnitudes == last)
        counted += (larger.to(tl.int64) << 31) + alike
    before = _look_back(progress, tile, tl.load(own + 7).to(tl.int32), counted)
    num_larger, num_equal = (before >> 31).to(tl.int32), (before & 0x7FFFFFFF).to(tl.int32)
    indices = (message + tl.load(own + 3)).to(tl.pointer_type(tl.int32))
    kept = (indices + sent).to(tl.pointer_type(tl.float32))
    for first in range(0, number, BLOCK):
        at = first + tl.arange(0, BLOCK)
        values, place = _read(origin, at, at < number)
        magnitudes = tl.where(at < number, _magnitude(values), -1)
        larger, alike = (magnitudes > last).to(tl.int32), (magnitudes == last).to(tl.int32)
        order = num_equal + tl.cumsum(alike, 0)  # 1: the first of equals
        chosen = (larger != 0) | ((alike != 0) & (order <= equal))
        out = num_larger + tl.minimum(num_equal, equal)
        out += tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.store(indices + out, place, mask=chosen)
        tl.store(kept + out, values, mask=chosen)
        if residual is not None:
            tl.store(residual + start + place, 0.0, mask=chosen)
        num_larger, num_equal = num_larger + tl.sum(larger, 0), num_equal + tl.sum(alike, 0)


@triton.jit
def _bounds(messages, number, stride, payload, sent, begin, end, LANES: tl.constexpr):
    """Bisect where each message's indices reach `begin` and `end`: two lanes for each."""
    lane = tl.arange(0, LANES)
    own = lane < 2 * number
    indices = (messages + (lane // 2).to(tl.int64) * stride + payload).to(tl.pointer_type(tl.int32))
    bound = tl.where(lane % 2 == 0, begin, end)
    found = tl.zeros((LANES,), tl.int32)
    for bit in range(0, 31):
        step = 1 << (30 - bit)
        if step <= sent:
            further = found + step
            there = own & (further <= sent)
            index = tl.load(indices + further - 1, mask=there, other=0)
            found = tl.where(there & (index < bound), further, found)
    return found


@triton.jit
def _clear(out, count, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Store zeros: `count` of them, or SIZE, in words of 16 bytes, if that is None."""
    for at in range(0, SIZE if count is None else count, BLOCK):
        place = at + tl.arange(0, BLOCK)
        if count is None:
            tl.store(out + place, 0.0)
        else:
            tl.store(out + place, 0.0, mask=place < count)


@triton.jit
def _divide(out, count, divisor, finite, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Divide values, as many as `_clear` does, and mark what is not finite."""
    for at in range(0, SIZE if count is None else count, BLOCK):
        place = at + tl.arange(0, BLOCK)
        if count is None:
            mean = divided(tl.load(out + place), divisor)
            tl.store(out + place, mean)
        else:
            mean = divided(tl.load(out + place, mask=place < count, other=0.0), divisor)
            tl.store(out + place, mean, mask=place < count)
        if not is_finite(mean):
            tl.store(finite, 0)


@triton.jit
def _add(
    messages, number, stride, out, own, first, count, LANES: tl.constexpr, BLOCK: tl.constexpr
):
    """Add up messages, in their order, in a part of a row that begins at `out`."""
    payload, sent = tl.load(own + 3), tl.load(own + 2).to(tl.int32)
    begin = first.to(tl.int32)
    found = _bounds(messages, number, stride, payload, sent, begin, begin + count, LANES)
    lane = tl.arange(0, LANES)
    for index in range(0, number):
        indices = (messages + index * stride + payload).to(tl.pointer_type(tl.int32))
        kept = (indices + sent).to(tl.pointer_type(tl.float32))
        low = tl.sum(tl.where(lane == 2 * index, found, 0), 0)
        high = tl.sum(tl.where(lane == 2 * index + 1, found, 0), 0)
        tl.debug_barrier()  # what others of this program have stored
        for at in range(low, high, BLOCK):
            each = at + tl.arange(0, BLOCK)
            place = tl.load(indices + each, mask=each < high, other=0) - begin
            total = tl.load(out + place, mask=each < high, other=0.0)
            total += tl.load(kept + each, mask=each < high, other=0.0)
            tl.store(out + place, total, mask=each < high)


@triton.jit
def _sum_copies(messages, number, stride, out, count, at, BLOCK: tl.constexpr):
    for first in range(0, count, BLOCK):
        place = first + tl.arange(0, BLOCK)
        total = tl.zeros((BLOCK,), tl.float32)
        for index in range(0, number):
            own = (messages + index * stride + at).to(tl.pointer_type(tl.float32))
            total += tl.load(own + place, mask=place < count, other=0.0)
        tl.store(out + place, total, mask=place < count)


# Numbers are not specialised: a 1 would become a constant, which is not a tensor.
@triton.jit(do_not_specialize=["number", "stride", "divisor"])
def spread_largest(
    messages,
    number,
    stride,
    out,
    rows,
    parts,
    divisor,
    finite,
    LANES: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    FEW: tl.constexpr,
):
    """Fill `out` with the sum of messages over `divisor`, and mark what is not finite."""
    part = parts + tl.program_id(0) * 4
    row, first, count = tl.load(part), tl.load(part + 1), tl.load(part + 2).to(tl.int32)
    at, by = tl.load(part + 3), divisor.to(tl.float32)
    if row < 0:
        _sum_copies(messages, number, stride, out + first, count, at, FEW)
        tl.debug_barrier()
        _divide(out + first, count, by, finite, SIZE, FEW)
    else:
        own = rows + row * FIELDS
        start = tl.load(own) + first
        if (at != 0) & (count == SIZE):
            even = out + start // 4 * 4
            _clear(even, None, SIZE, BLOCK)
            _add(messages, number, stride, even, own, first, count, LANES, FEW)
            tl.debug_barrier()
            _divide(even, None, by, finite, SIZE, BLOCK)
        else:
            _clear(out + start, count, SIZE, BLOCK)
            _add(messages, number, stride, out + start, own, first, count, LANES, FEW)
            tl.debug_barrier()
            _divide(out + start, count, by, finite, SIZE, BLOCK)
