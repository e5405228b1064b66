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
        memory: uint8 [lines, line_bytes(matrices, size)]; lines are encoded shards: one per rank,
            or this rank's alone.
    """

    def __init__(self, matrices: Sequence[Matrix], size: int, memory: Tensor) -> None:
        self.bytes = memory
        self.heights = [matrix.shard_rows(size) for matrix in matrices]
        self.columns = [matrix.columns for matrix in matrices]
        self.scale_bytes = codec.SCALE_BYTES * sum(self.heights)
        self._padded = any(matrix.rows % size for matrix in matrices)
        bit_bytes = [
            matrix.shard_rows(size) * codec.bit_bytes(matrix.columns) for matrix in matrices
        ]
        self._scales = self.scales().split(self.heights, dim=1)
        bits = memory[:, self.scale_bytes : self.scale_bytes + sum(bit_bytes)]
        self._bits = bits.split(bit_bytes, dim=1)

    @classmethod
    def within(
        cls,
        buffers: ScratchBuffer,
        matrices: Sequence[Matrix],
        size: int,
        lines: int,
        like: Tensor,
    ) -> Message:
        """Return a message in memory that the next one of `buffers` reuses.

        Args:
            like: tensor on the device.
        """
        byte = like.new_empty(0, dtype=torch.uint8)
        return cls(matrices, size, buffers.take(byte, lines, line_bytes(matrices, size)))

    def encode(
        self, gradients: Sequence[Tensor], residuals: Sequence[Tensor | None], threshold: str
    ) -> None:
        """Fill each rank's line with its shards of this rank's gradients.

        Args:
            gradients: float32 [rows, columns], one for each matrix.
            residuals: like `gradients`; added to them, replaced by the error. None: no feedback.
            threshold: see lab.codec.onebit.codec.encode.
        """
        self._pad()
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
        self._pad()
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

    def deliver(self, values: Sequence[Tensor], divisor: int = 1) -> Tensor:
        """Decode all lines as `decode`, divided by `divisor`, which changes the message's scales.

        Returns:
            bool [], whether all decoded values are finite.
        """
        finite = self.scales().isfinite().all()
        if divisor != 1:
            self.scales().div_(divisor)
        self.decode(values)
        return finite

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

    def _pad(self) -> None:
        """Fill up short shards, before the others are encoded."""
        if self._padded:
            self.bytes.zero_()


def line_bytes(matrices: Sequence[Matrix], size: int) -> int:
    """Return the bytes of one shard among `size` ranks, a line of a message."""
    width = sum(
        matrix.shard_rows(size) * (codec.SCALE_BYTES + codec.bit_bytes(matrix.columns))
        for matrix in matrices
    )
    return -(-width // LINE_BYTES) * LINE_BYTES
