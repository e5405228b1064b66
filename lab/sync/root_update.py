"""RootUpdate: only rank 0 updates the weights, and sends them to all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from torch import Tensor

from lab.distributed.collective import Collective
from lab.exchange.base import Rooted
from lab.exchange.bucket import BucketPlan, GradBucket
from lab.sync.base import SyncParts
from lab.sync.flatten import flatten, refuse_complex
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
