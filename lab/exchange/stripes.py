"""How quantised matrices are dealt to the ranks, and the bytes that carry them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lab.codec import onebit
from lab.exchange.buffers import Buffers


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
    padded with zeros, so that all lines are equally long.

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
        # Lines of whole float32 words keep every line's scales aligned.
        self.bytes = buffers.take(like, lines, -(-width // 4) * 4)
        if any(matrix.rows % size for matrix in matrices):
            self.bytes.zero_()
        self._scales = self.scales().split(self.heights, dim=1)
        self._bits = self.bytes[:, self.scale_bytes : width].split(bit_bytes, dim=1)

    def scales(self) -> Tensor:
        """All scales: float32 [lines, rows, 2], sharing memory with `bytes`."""
        words = self.bytes.view(torch.float32)[:, : self.scale_bytes // 4]
        return words.unflatten(1, (-1, 2))

    def all_parts(self, index: int, rows: int) -> tuple[Tensor, Tensor]:
        """`parts` of all lines: float32 [lines, rows, 2] and uint8 [lines, rows, bit_bytes]."""
        width = onebit.bit_bytes(self.columns[index])
        bits = self._bits[index][:, : rows * width].unflatten(1, (rows, width))
        return self._scales[index][:, :rows], bits

    def parts(self, index: int, line: int, rows: int) -> tuple[Tensor, Tensor]:
        """Scales and bits of the first `rows` rows of matrix `index` in `line`, to fill or read.

        Returns:
            float32 [rows, 2] and uint8 [rows, bit_bytes], sharing memory with `bytes`.
        """
        scales, bits = self.all_parts(index, rows)
        return scales[line], bits[line]
