"""The small tensors of a compressing exchange, sent uncompressed in one message."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lab.distributed.collective import Done
from lab.distributed.comm import Comm
from lab.exchange.base import Exchange, Shapes
from lab.exchange.bucket import GradBucket

NOTABLE = 0.1  # share of all values: sent as float32, they are most of what one bit each leaves


def left_exact(exchange: Exchange, shapes: Shapes) -> list[str]:
    """Say which values an exchange's codecs leave as they are, a line each, where they are many.

    Args:
        shapes: of the parameters that are exchanged, by name.
    """
    total = sum(map(math.prod, shapes.values()))
    return [
        f"{100 * number / total:.0f} % of the values travel as float32 ({number:,} of {total:,}): "
        f"{which}"
        for number, which in exchange.left_exact(shapes)
        if number >= NOTABLE * max(1, total)
    ]


class ExactMeans:
    """An all-reduce under way that averages `parts` of a bucket over the ranks.

    Attributes:
        collective: the all-reduce, which has begun.
    """

    def __init__(self, bucket: GradBucket, parts: list[slice], comm: Comm) -> None:
        self._pieces = [bucket.flat[part] for part in parts]
        self._sums = torch.cat([bucket.flat[:0], *self._pieces])
        self._size = comm.size
        self.collective = comm.iall_reduce(self._sums) if len(self._sums) else Done()

    def put_back(self) -> Tensor:
        """Replace the parts of the bucket by their means, once `collective` is done.

        Returns:
            float32 [values of all parts]: the means, one part after the other.
        """
        means = self._sums.div_(self._size)
        put_back(self._pieces, means)
        return means


def average_exactly(bucket: GradBucket, parts: list[slice], comm: Comm) -> None:
    """Replace `parts` of `bucket.flat` by their mean over the ranks."""
    means = ExactMeans(bucket, parts, comm)
    means.collective.wait()
    means.put_back()


def put_back(pieces: Sequence[Tensor], values: Tensor) -> None:
    """Copy `values`, [values of all pieces], to where the pieces were cut out."""
    if len(values):
        torch._foreach_copy_(list(pieces), list(values.split([len(piece) for piece in pieces])))


def gaps(covered: Iterable[slice], num_values: int) -> list[slice]:
    """Return the slices of `num_values` values between the ordered slices `covered`."""
    between, start = [], 0
    for part in covered:
        if start < part.start:
            between.append(slice(start, part.start))
        start = part.stop
    return [*between, slice(start, num_values)] if start < num_values else between
