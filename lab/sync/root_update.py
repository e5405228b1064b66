"""RootUpdate: only rank 0 updates the weights, and sends them to all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

from lab.distributed.collective import Collective
from lab.exchange.bucket import BucketPlan, GradBucket
from lab.exchange.layout import is_rows_first, travelling
from lab.exchange.paths import Rooted
from lab.sync.base import SyncParts
from lab.sync.gradsync import GradSync
from lab.sync.pattern import root_update


class RootUpdate(GradSync):
    """A sync that reduces gradients to rank 0, and broadcasts its updated weights on the same path.

    Caffe's P2PSync, Torch7's nn.DataParallelTable and TensorFlow's parameter server share this
    pattern. The other ranks are left without gradients, so their optimizers do nothing and hold no
    momentum. Those systems send weights when the next forward begins; here they are sent right
    after the update, with nothing in between, so that replicas are equal after every step.

    The weights of a bucket share one block of memory, as Caffe's do, and are sent from there.

    The exchange is the path, a tree or a star. `overlap` applies to the gradients.

    Raises:
        ValueError: an exchange that does not pass through rank 0.
    """

    def __init__(self, parts: SyncParts) -> None:
        exchange = parts.exchange
        if not isinstance(exchange, Rooted) or not exchange.in_halves:
            raise ValueError(
                f"exchange={type(exchange).__name__}: the root alone updates; allowed are those "
                "that go to it and back, tree (with exchange.chunk_mb=null) and star"
            )
        self.path = exchange
        super().__init__(parts, root_update(parts.overlap))

    def finish(self) -> Tensor | None:
        """Wait until rank 0 has the mean gradient; other ranks keep none."""
        finite = super().finish()
        if self.comm.rank:
            for bucket in self.buckets:
                for parameter in bucket.parameters.values():
                    parameter.grad = None
        return finite

    def after_update(self, last: bool) -> None:
        """Send rank 0's weights to all ranks."""
        for bucket, weights in zip(self.buckets, self._weights, strict=True):
            label = f"{type(self.path).__name__} of weights {bucket}"
            self.worker.submit(label, partial(self._from_root, weights))
        self.worker.wait()

    def _use(self, buckets: list[BucketPlan]) -> None:
        super()._use(buckets)
        for bucket in buckets:
            refuse_complex("root_update", bucket.parameters)
        self._weights = [flatten(list(bucket.parameters.values())) for bucket in buckets]

    def _stages(self, bucket: GradBucket) -> Iterator[Collective]:
        self.path.to_root(bucket, self.comm)
        bucket.unpack()
        yield from ()

    def _from_root(self, weights: Tensor) -> Iterator[Collective]:
        self.path.from_root(weights, self.comm)
        yield from ()


def flatten(parameters: list[nn.Parameter], multiple: int = 1) -> Tensor:
    """Move `parameters` into one block of memory, each in the order in which its values travel.

    Args:
        parameters: real and of one dtype. One that is not row after row becomes row-major.
        multiple: divides the block's length; zeros fill it up.

    Returns:
        [number of values, rounded up].
    """
    rows = [travelling(p, p) for p in parameters]
    missing = -sum(map(len, rows)) % multiple
    flat = torch.cat([*rows, rows[0].new_zeros(missing)]) if len(rows) > 1 or missing else rows[0]
    parts = torch.split(flat[: len(flat) - missing], [len(row) for row in rows])
    for parameter, part in zip(parameters, parts, strict=True):
        rows_first = is_rows_first(parameter)
        parameter.data = (
            part.as_strided(parameter.shape, parameter.stride())
            if rows_first
            else part.view(parameter.shape)
        )
    return flat


def refuse_complex(strategy: str, parameters: dict[str, nn.Parameter]) -> None:
    """Refuse complex parameters, whose weights a sync would have to move as pairs.

    Raises:
        ValueError: names one.
    """
    for name, parameter in parameters.items():
        if parameter.is_complex():
            kind = str(parameter.dtype).removeprefix("torch.")
            raise ValueError(
                f"{name}: is {kind}; strategy={strategy} moves real weights; use one that averages "
                "gradients, such as allreduce"
            )
