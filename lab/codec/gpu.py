"""The 1-bit codec in Triton, for CUDA tensors: the twin of lab/codec/reference.py.

One program works on one row. Its second pass finds the row in the GPU's cache; nothing waits for
the host, and no temporary is as large as the gradient.
"""

# Triton reads annotations as code, and takes plain values where its kernels say constexpr.
# pyright: reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BYTES = 256  # of bits in one tile: 2048 values


@triton.jit
def _values(gradient, residual, at, there, FEEDBACK: tl.constexpr):
    values = tl.load(gradient + at, mask=there, other=0.0)
    if FEEDBACK:
        values += tl.load(residual + at, mask=there, other=0.0)
    return values


@triton.jit
def _tile(start, columns, BYTES: tl.constexpr):
    """Columns of a tile, one line for each byte of bits, and which of them exist."""
    at = start + tl.arange(0, BYTES)[:, None] * 8 + tl.arange(0, 8)[None, :]
    return at, at < columns


@triton.jit
def _sides(
    gradient,
    residual,
    row,
    columns,
    FEEDBACK: tl.constexpr,
    BYTES: tl.constexpr,
):
    """Means of a row's negative and of its other values. An empty side's is 0."""
    lower = tl.zeros((BYTES, 8), tl.float64)
    upper = tl.zeros((BYTES, 8), tl.float64)
    num_upper = tl.zeros((BYTES, 8), tl.int32)
    for start in range(0, columns, BYTES * 8):
        at, there = _tile(start, columns, BYTES)
        values = _values(gradient, residual, row * columns + at, there, FEEDBACK)
        is_upper = (values >= 0.0) & there
        lower += tl.where(is_upper, 0.0, values).to(tl.float64)
        upper += tl.where(is_upper, values, 0.0).to(tl.float64)
        num_upper += is_upper.to(tl.int32)
    count = tl.sum(tl.sum(num_upper, 1), 0)
    low = tl.sum(tl.sum(lower, 1), 0) / tl.maximum(columns - count, 1).to(tl.float64)
    high = tl.sum(tl.sum(upper, 1), 0) / tl.maximum(count, 1).to(tl.float64)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def _mean(
    gradient,
    residual,
    row,
    columns,
    FEEDBACK: tl.constexpr,
    BYTES: tl.constexpr,
):
    total = tl.zeros((BYTES, 8), tl.float64)
    for start in range(0, columns, BYTES * 8):
        at, there = _tile(start, columns, BYTES)
        values = _values(gradient, residual, row * columns + at, there, FEEDBACK)
        total += values.to(tl.float64)
    return (tl.sum(tl.sum(total, 1), 0) / columns.to(tl.float64)).to(tl.float32)


@triton.jit
def _deviation(
    gradient,
    residual,
    row,
    columns,
    mean,
    FEEDBACK: tl.constexpr,
    BYTES: tl.constexpr,
):
    total = tl.zeros((BYTES, 8), tl.float64)
    for start in range(0, columns, BYTES * 8):
        at, there = _tile(start, columns, BYTES)
        values = _values(gradient, residual, row * columns + at, there, FEEDBACK)
        total += tl.where(there, tl.abs(values - mean), 0.0).to(tl.float64)
    return (tl.sum(tl.sum(total, 1), 0) / columns.to(tl.float64)).to(tl.float32)


# A number that happens to be 1 would otherwise become a constant, which is no tensor.
@triton.jit(do_not_specialize=["columns"])
def _encode(
    gradient,
    residual,
    scales,
    bits,
    columns,
    SPLIT_AT_MEAN: tl.constexpr,
    FEEDBACK: tl.constexpr,
    BYTES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if SPLIT_AT_MEAN:
        split = _mean(gradient, residual, row, columns, FEEDBACK, BYTES)
        deviation = _deviation(gradient, residual, row, columns, split, FEEDBACK, BYTES)
        low, high = split - deviation, split + deviation
    else:
        split = 0.0
        low, high = _sides(gradient, residual, row, columns, FEEDBACK, BYTES)
    tl.store(scales + 2 * row, low)
    tl.store(scales + 2 * row + 1, high)
    width = (columns + 7) // 8
    for start in range(0, columns, BYTES * 8):
        at, there = _tile(start, columns, BYTES)
        values = _values(gradient, residual, row * columns + at, there, FEEDBACK)
        is_upper = (values >= split) & there
        packed = tl.sum(is_upper.to(tl.int32) << tl.arange(0, 8)[None, :], 1)
        byte = start // 8 + tl.arange(0, BYTES)
        tl.store(bits + row * width + byte, packed.to(tl.uint8), mask=byte < width)
        if FEEDBACK:
            lost = values - tl.where(is_upper, high, low)
            tl.store(residual + row * columns + at, lost, mask=there)


@triton.jit(do_not_specialize=["columns"])
def _decode(scales, bits, out, columns, ADD: tl.constexpr, BYTES: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BYTES * 8
    at, there = _tile(start, columns, BYTES)
    width = (columns + 7) // 8
    byte = start // 8 + tl.arange(0, BYTES)
    packed = tl.load(bits + row * width + byte, mask=byte < width, other=0).to(tl.int32)
    is_upper = (packed[:, None] >> tl.arange(0, 8)[None, :]) & 1
    low, high = tl.load(scales + 2 * row), tl.load(scales + 2 * row + 1)
    values = tl.where(is_upper != 0, high, low)
    if ADD:
        values += tl.load(out + row * columns + at, mask=there, other=0.0)
    tl.store(out + row * columns + at, values, mask=there)


def encode(
    gradient: Tensor, residual: Tensor | None, threshold: str, scales: Tensor, bits: Tensor
) -> None:
    """See lab.codec.onebit.encode. All tensors contiguous."""
    rows, columns = gradient.shape
    if rows:
        with torch.cuda.device_of(gradient):
            _encode[(rows,)](
                gradient,
                gradient if residual is None else residual,
                scales,
                bits,
                columns,
                SPLIT_AT_MEAN=threshold == "mean",
                FEEDBACK=residual is not None,
                BYTES=BYTES,
            )


def decode(scales: Tensor, bits: Tensor, out: Tensor, add: bool) -> None:
    """See lab.codec.onebit.decode. All tensors contiguous."""
    rows, columns = out.shape
    if rows:
        with torch.cuda.device_of(out):
            tiles = triton.cdiv(columns, BYTES * 8)
            _decode[(rows, tiles)](scales, bits, out, columns, ADD=add, BYTES=BYTES)
