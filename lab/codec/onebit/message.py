"""The wire format of 1-bit SGD: a bucket's matrices as one message, encoded, summed and decoded.

A bucket enters the codec once per stage, here; lab.codec.onebit.codec is called per matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lab.codec.onebit import codec
from lab.codec.scratch import ScratchBuffer

LINE_BYTES = 128  # lines are multiples of it: NCCL and GPUs copy aligned memory in wide words


@dataclass(frozen=True)
class Matrix:
    """A part of a bucket that is quantised: `rows` x `columns` values from `start` on.

    Its rows are sharded evenly among the ranks; the last shards may be short or empty.
    """

    name: str
    start: int
    rows: int
    columns: int

    @property
    def stop(self) -> int:
        return self.start + self.rows * self.columns

    def view(self, flat: Tensor) -> Tensor:
        """Return this matrix's values in a bucket: [rows, columns], sharing memory with `flat`."""
        return flat[self.start : self.stop].view(self.rows, self.columns)

    def shard_rows(self, size: int) -> int:
        """Return the number of rows of a full shard among `size` ranks."""
        return -(-self.rows // size)

    def shard(self, rank: int, size: int) -> slice:
        """Return the rows that `rank` of `size` ranks sums."""
        height = self.shard_rows(size)
        return slice(min(rank * height, self.rows), min((rank + 1) * height, self.rows))


class Message:
    """Bits and scales of shards in wire format: uint8 [lines, bytes], one shard per line.

    A line holds the scales of all matrices first and their bits after them. Short shards are
    padded with zeros, so that all lines are equally long: a multiple of LINE_BYTES.

    Args:
        size: number of ranks, among which rows are sharded.
        lines: number of encoded shards: one per rank, or this rank's alone.
        like: tensor on the device.
        buffers: memory for the bytes, which the next message reuses.
    """

    def __init__(
        self,
        matrices: Sequence[Matrix],
        size: int,
        lines: int,
        like: Tensor,
        buffers: ScratchBuffer,
    ) -> None:
        self.heights = [matrix.shard_rows(size) for matrix in matrices]
        self.columns = [matrix.columns for matrix in matrices]
        self.scale_bytes = codec.SCALE_BYTES * sum(self.heights)
        bit_bytes = [
            height * codec.bit_bytes(columns)
            for height, columns in zip(self.heights, self.columns, strict=True)
        ]
        width = self.scale_bytes + sum(bit_bytes)
        byte = like.new_empty(0, dtype=torch.uint8)
        self.bytes = buffers.take(byte, lines, -(-width // LINE_BYTES) * LINE_BYTES)
        if any(matrix.rows % size for matrix in matrices):
            self.bytes.zero_()
        self._scales = self.scales().split(self.heights, dim=1)
        self._bits = self.bytes[:, self.scale_bytes : width].split(bit_bytes, dim=1)

    def encode(
        self, gradients: Sequence[Tensor], residuals: Sequence[Tensor | None], threshold: str
    ) -> None:
        """Fill each rank's line with its shards of this rank's gradients.

        Args:
            gradients: float32 [rows, columns], one for each matrix.
            residuals: like `gradients`; added to them, replaced by the error. None: no feedback.
            threshold: see lab.codec.onebit.codec.encode.
        """
        for index, (gradient, residual) in enumerate(zip(gradients, residuals, strict=True)):
            if len(gradient):  # a rank's own shard may be empty
                codec.encode(gradient, residual, threshold, *self.part(index))

    def encode_sum(
        self,
        received: Message,
        shards: Sequence[Tensor],
        residuals: Sequence[Tensor | None],
        threshold: str,
    ) -> None:
        """Decode the lines of `received`, sum them in rank order and encode the sum.

        The sum becomes the only line of this message.

        Args:
            received: this rank's shards, a line from each rank.
            shards: float32 [rows, columns], one for each matrix: scratch memory for the sums.
            residuals: the sums' residuals, as in `encode`.
            threshold: see lab.codec.onebit.codec.encode.
        """
        for index, (shard, residual) in enumerate(zip(shards, residuals, strict=True)):
            scales, bits = self.part(index, len(shard))
            codec.reduce(
                *received.part(index, len(shard)), shard, residual, threshold, scales[0], bits[0]
            )

    def add_up(self, shards: Sequence[Tensor]) -> None:
        """Decode all lines, each a rank's, and leave their sum in rank order in `shards`.

        Args:
            shards: float32 [rows, columns], one for each matrix.
        """
        for index, shard in enumerate(shards):
            scales, bits = self.part(index, len(shard))
            for line in range(len(scales) if len(shard) else 0):
                of_line = scales[line : line + 1], bits[line : line + 1]
                codec.decode(*of_line, shard, add=line > 0)

    def decode(self, values: Sequence[Tensor]) -> None:
        """Decode all lines into `values`, float32 [rows, columns] for each matrix."""
        for index, out in enumerate(values):
            codec.decode(*self.part(index), out)

    def scales(self) -> Tensor:
        """Return all scales: float32 [lines, rows, 2], sharing memory with `bytes`."""
        words = self.bytes.view(torch.float32)[:, : self.scale_bytes // 4]
        return words.unflatten(1, (-1, 2))

    def part(self, index: int, rows: int | None = None) -> tuple[Tensor, Tensor]:
        """Return scales and bits of matrix `index` in all lines, sharing memory with `bytes`.

        Args:
            rows: how many rows of each line to take; None: all.

        Returns:
            float32 [lines, rows, 2] and uint8 [lines, rows, bit_bytes].
        """
        rows = self.heights[index] if rows is None else rows
        width = codec.bit_bytes(self.columns[index])
        bits = self._bits[index][:, : rows * width].unflatten(1, (rows, width))
        return self._scales[index][:, :rows], bits
