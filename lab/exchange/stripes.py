"""How quantised matrices are dealt to the ranks, and the bytes that carry them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lab.codec.buffers import Buffers
from lab.codec.onebit import codec as onebit

LINE_BYTES = 128  # lines are multiples of it: NCCL and GPUs copy aligned memory in wide words


@dataclass(frozen=True)
class Matrix:
    """A part of a bucket that is quantised: `rows` x `columns` values from `start` on.

    Rows are dealt to the ranks in equal stripes; the last ranks' may be short or empty.
    """

    name: str
    start: int
    rows: int
    columns: int

    def of(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.stop].view(self.rows, self.columns)

    @property
    def stop(self) -> int:
        return self.start + self.rows * self.columns

    def stripe_rows(self, size: int) -> int:
        return -(-self.rows // size)

    def stripe(self, rank: int, size: int) -> slice:
        """The rows that `rank` of `size` ranks sums."""
        height = self.stripe_rows(size)
        return slice(min(rank * height, self.rows), min((rank + 1) * height, self.rows))


class Message:
    """One rank's bits and scales for every rank, as the wire carries them: uint8 [size, bytes].

    A line holds the scales of all matrices first and their bits after them. Short stripes are
    padded with zeros, so that all lines are equally long: a multiple of LINE_BYTES.

    Args:
        size: number of ranks, among which rows are dealt out.
        lines: of how many ranks this is the message.
        like: uint8 tensor on the device.
        buffers: hold the bytes until the next message is made with them.
    """

    def __init__(
        self, matrices: list[Matrix], size: int, lines: int, like: Tensor, buffers: Buffers
    ) -> None:
        self.heights = [matrix.stripe_rows(size) for matrix in matrices]
        self.columns = [matrix.columns for matrix in matrices]
        self.scale_bytes = onebit.SCALE_BYTES * sum(self.heights)
        bit_bytes = [
            height * onebit.bit_bytes(columns)
            for height, columns in zip(self.heights, self.columns, strict=True)
        ]
        width = self.scale_bytes + sum(bit_bytes)
        self.bytes = buffers.take(like, lines, -(-width // LINE_BYTES) * LINE_BYTES)
        if any(matrix.rows % size for matrix in matrices):
            self.bytes.zero_()
        self._scales = self.scales().split(self.heights, dim=1)
        self._bits = self.bytes[:, self.scale_bytes : width].split(bit_bytes, dim=1)

    def scales(self) -> Tensor:
        """All scales: float32 [lines, rows, 2], sharing memory with `bytes`."""
        words = self.bytes.view(torch.float32)[:, : self.scale_bytes // 4]
        return words.unflatten(1, (-1, 2))

    def of(self, index: int, rows: int | None = None) -> tuple[Tensor, Tensor]:
        """Scales and bits of matrix `index` in all lines, to fill or read: they share memory.

        Args:
            rows: the first ones of each line; None: all.

        Returns:
            float32 [lines, rows, 2] and uint8 [lines, rows, bit_bytes].
        """
        rows = self.heights[index] if rows is None else rows
        width = onebit.bit_bytes(self.columns[index])
        bits = self._bits[index][:, : rows * width].unflatten(1, (rows, width))
        return self._scales[index][:, :rows], bits
