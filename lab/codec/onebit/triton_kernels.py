"""The Triton kernels of the 1-bit codec; lab/codec/onebit/triton_codec.py launches them.

A program takes `ROWS` whole rows, `BYTES` times eight values of each at once: a tile. With ON_CHIP
a tile holds whole rows, which stay in registers from the first pass over them to the last.
"""

# Triton reads annotations as code, and takes plain values where its kernels say constexpr.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _offset(row, height, line_stride, row_stride):
    """Return the offset of a row in a message, each of whose lines holds `height` rows."""
    return row // height * line_stride + row % height * row_stride


@triton.jit
def _tile(row, start, rows, columns, BYTES: tl.constexpr):
    """Return the columns of a tile [rows, bytes of bits, 8], and a mask of values that exist."""
    at = start + (tl.arange(0, BYTES)[:, None] * 8 + tl.arange(0, 8)[None, :])[None, :, :]
    return at, (at < columns) & (row < rows)[:, None, None]


@triton.jit
def _decoded(scales, bits, start, columns, exists, BYTES: tl.constexpr):
    """Decode a tile of rows whose scales and bits begin at these pointers."""
    byte = start // 8 + tl.arange(0, BYTES)[None, :]
    mask = (byte * 8 < columns) & exists[:, None]
    packed = tl.load(bits[:, None] + byte, mask=mask, other=0).to(tl.int32)
    is_upper = (packed[:, :, None] >> tl.arange(0, 8)[None, None, :]) & 1
    low = tl.load(scales, mask=exists, other=0.0)[:, None, None]
    high = tl.load(scales + 1, mask=exists, other=0.0)[:, None, None]
    return tl.where(is_upper != 0, high, low)


@triton.jit
def _values(origin, row, start, rows, columns, SUM: tl.constexpr, BYTES: tl.constexpr):
    """Load a tile of values to encode: a gradient or the sum of all ranks', plus the residual.

    Args:
        origin: the gradient or the first rank's scales, that rank's bits, the number of ranks, the
            strides between ranks of scales and of bits, and the residual or None.
    """
    source, source_bits, num_ranks, rank_scales, rank_bits, residual = origin
    at, there = _tile(row, start, rows, columns, BYTES)
    place = row[:, None, None] * columns + at
    if SUM:
        values = tl.zeros_like(place).to(tl.float32)
        for rank in range(0, num_ranks):
            scales = source + rank * rank_scales + 2 * row
            bits = source_bits + rank * rank_bits + row * ((columns + 7) // 8)
            values += _decoded(scales, bits, start, columns, row < rows, BYTES)
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
    values,
    row,
    rows,
    columns,
    SUM: tl.constexpr,
    ON_CHIP: tl.constexpr,
    BYTES: tl.constexpr,
):
    """Return the means of each row's negative and of its other values; 0 for an empty side."""
    lower = tl.zeros((values.shape[0],), tl.float64)
    upper = tl.zeros((values.shape[0],), tl.float64)
    num_upper = tl.zeros((values.shape[0],), tl.int32)
    for start in range(0, BYTES * 8 if ON_CHIP else columns, BYTES * 8):
        if not ON_CHIP:
            values = _values(origin, row, start, rows, columns, SUM, BYTES)
        _, there = _tile(row, start, rows, columns, BYTES)
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
    values,
    row,
    rows,
    columns,
    SUM: tl.constexpr,
    ON_CHIP: tl.constexpr,
    BYTES: tl.constexpr,
):
    """Return each row's mean and its mean absolute deviation."""
    total = tl.zeros((values.shape[0],), tl.float64)
    distance = tl.zeros((values.shape[0],), tl.float64)
    for start in range(0, BYTES * 8 if ON_CHIP else columns, BYTES * 8):
        if not ON_CHIP:
            values = _values(origin, row, start, rows, columns, SUM, BYTES)
        total += _sum(values)
    mean = (total / columns.to(tl.float64)).to(tl.float32)
    for start in range(0, BYTES * 8 if ON_CHIP else columns, BYTES * 8):
        if not ON_CHIP:
            values = _values(origin, row, start, rows, columns, SUM, BYTES)
        _, there = _tile(row, start, rows, columns, BYTES)
        distance += _sum(tl.where(there, tl.abs(values - mean[:, None, None]), 0.0))
    return mean, (distance / columns.to(tl.float64)).to(tl.float32)


# Numbers are not specialised: a 1 would become a constant, which is not a tensor.
@triton.jit(
    do_not_specialize=[
        *("num_ranks", "rank_scales", "rank_bits"),
        *("rows", "columns", "height", "scales_stride", "bits_stride"),
    ]
)
def encode_rows(
    source,
    source_bits,
    num_ranks,
    rank_scales,
    rank_bits,
    residual,
    scales,
    bits,
    rows,
    columns,
    height,
    scales_stride,
    bits_stride,
    SPLIT_AT_MEAN: tl.constexpr,
    SUM: tl.constexpr,
    EVEN: tl.constexpr,
    ON_CHIP: tl.constexpr,
    ROWS: tl.constexpr,
    BYTES: tl.constexpr,
):
    if EVEN:  # changes nothing, but tells the compiler that it may move 16 bytes at once
        columns = columns // 16 * 16
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    exists = row < rows
    origin = (source, source_bits, num_ranks, rank_scales, rank_bits, residual)
    values = _values(origin, row, 0, rows, columns, SUM, BYTES)
    if SPLIT_AT_MEAN:
        split, distance = _mean_and_deviation(
            origin, values, row, rows, columns, SUM, ON_CHIP, BYTES
        )
        low, high = split - distance, split + distance
    else:
        split = tl.zeros((ROWS,), tl.float32)
        low, high = _side_means(origin, values, row, rows, columns, SUM, ON_CHIP, BYTES)
    row_scales = scales + _offset(row, height, scales_stride, 2)
    tl.store(row_scales, low, mask=exists)
    tl.store(row_scales + 1, high, mask=exists)
    row_bits = bits + _offset(row, height, bits_stride, (columns + 7) // 8)[:, None]
    for start in range(0, BYTES * 8 if ON_CHIP else columns, BYTES * 8):
        if not ON_CHIP:
            values = _values(origin, row, start, rows, columns, SUM, BYTES)
        at, there = _tile(row, start, rows, columns, BYTES)
        is_upper = (values >= split[:, None, None]) & there
        packed = tl.sum(is_upper.to(tl.int32) << tl.arange(0, 8)[None, None, :], 2)
        byte = start // 8 + tl.arange(0, BYTES)[None, :]
        tl.store(row_bits + byte, packed.to(tl.uint8), mask=(byte * 8 < columns) & exists[:, None])
        if residual is not None:
            lost = values - tl.where(is_upper, high[:, None, None], low[:, None, None])
            tl.store(residual + row[:, None, None] * columns + at, lost, mask=there)


@triton.jit(
    do_not_specialize=["rows", "columns", "height", "scales_stride", "bits_stride"],
)
def decode_rows(
    scales,
    bits,
    out,
    rows,
    columns,
    height,
    scales_stride,
    bits_stride,
    ADD: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    BYTES: tl.constexpr,
):
    if EVEN:
        columns = columns // 16 * 16
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    start = tl.program_id(1) * BYTES * 8
    at, there = _tile(row, start, rows, columns, BYTES)
    row_scales = scales + _offset(row, height, scales_stride, 2)
    row_bits = bits + _offset(row, height, bits_stride, (columns + 7) // 8)
    values = _decoded(row_scales, row_bits, start, columns, row < rows, BYTES)
    place = row[:, None, None] * columns + at
    if ADD:
        values += tl.load(out + place, mask=there, other=0.0)
    tl.store(out + place, values, mask=there)
