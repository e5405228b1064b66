"""The 1-bit codec in Triton, for CUDA tensors: one launch encodes, sums or decodes a whole matrix.

A program takes whole rows, as many short ones as fill a tile. Rows of up to LONGEST values stay in
registers, so that gradient and residual are read once. Longer rows are read again in each pass;
their programs are so large that all running ones together fit into the GPU's cache. Nothing waits
for the host, and no temporary is as large as the gradient.
"""

# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from lab.codec.onebit.triton_kernels import decode_rows, encode_rows

TILE = 2048  # values of a program of short rows
LONGEST = 16384  # values of a row that registers hold: 16 for each of 1024 threads
PIECE = 8192  # values of a longer row that are read at once
VALUES_PER_THREAD = 16
WARP = 32


class Tile(NamedTuple):
    """One program's share: `rows` rows, of which it reads 8 * `num_bytes` values at once."""

    rows: int
    num_bytes: int

    @property
    def num_warps(self) -> int:
        return max(4, self.rows * self.num_bytes * 8 // (VALUES_PER_THREAD * WARP))


def tile_of(columns: int, most: int) -> Tile:
    """Return the tile for rows of `columns` values, at most `most` of each row at once."""
    width = min(max(8, triton.next_power_of_2(columns)), most)
    return Tile(max(1, TILE // width), width // 8)


def encode(
    gradient: Tensor, residual: Tensor | None, threshold: str, scales: Tensor, bits: Tensor
) -> None:
    """See lab.codec.onebit.codec.encode."""
    _launch_encode((gradient, gradient, 0, 0, 0), residual, threshold, scales, bits, gradient)


def reduce(
    scales: Tensor,
    bits: Tensor,
    total: Tensor,
    residual: Tensor | None,
    threshold: str,
    out_scales: Tensor,
    out_bits: Tensor,
) -> None:
    """See lab.codec.onebit.codec.reduce. The sum is never written to memory."""
    sent = scales, bits, len(scales), scales.stride(0), bits.stride(0)
    _launch_encode(sent, residual, threshold, out_scales[None], out_bits[None], total)


def decode(scales: Tensor, bits: Tensor, out: Tensor, add: bool) -> None:
    """See lab.codec.onebit.codec.decode."""
    rows, columns = out.shape
    tile = tile_of(columns, TILE)
    if rows:
        grid = triton.cdiv(rows, tile.rows), triton.cdiv(columns, 8 * tile.num_bytes)
        with torch.cuda.device_of(out):
            decode_rows[grid](
                *(scales, bits, out, rows, columns),
                *(scales.shape[1], scales.stride(0), bits.stride(0)),
                ADD=add,
                EVEN=columns % 16 == 0,
                ROWS=tile.rows,
                BYTES=tile.num_bytes,
                num_warps=tile.num_warps,
            )


def _launch_encode(
    source: tuple[Tensor, Tensor, int, int, int],
    residual: Tensor | None,
    threshold: str,
    scales: Tensor,
    bits: Tensor,
    like: Tensor,
) -> None:
    """Encode a gradient, or the sum of all ranks' messages, of the shape of `like`.

    Args:
        source: the gradient twice, and zeros; or scales and bits of all ranks, their number, and
            the strides between ranks.
    """
    rows, columns = like.shape
    on_chip = columns <= LONGEST
    tile = tile_of(columns, LONGEST if on_chip else PIECE)
    if rows:
        with torch.cuda.device_of(like):
            encode_rows[(triton.cdiv(rows, tile.rows),)](
                *(*source, residual, scales, bits, rows, columns),
                *(scales.shape[1], scales.stride(0), bits.stride(0)),
                SPLIT_AT_MEAN=threshold == "mean",
                SUM=source[2] > 0,
                EVEN=columns % 16 == 0,
                ON_CHIP=on_chip,
                ROWS=tile.rows,
                BYTES=tile.num_bytes,
                num_warps=tile.num_warps,
            )
