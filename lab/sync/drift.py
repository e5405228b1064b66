"""Drift: does an exchange deliver, in time, what ranks give it?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from lab.distributed.collective import Collective
from lab.distributed.comm import Comm
from lab.distributed.worker import Worker
from lab.exchange.base import Exchange
from lab.exchange.bucket import GradBucket
from lab.sync.findings import Findings


class Drift:
    """Compares what an exchange delivers with what was due, over windows of one bucket each.

    A single step of a codec with error feedback is far off by design: it keeps the rest for later.
    So the sums over a window are compared, with the residuals' part taken into account. With true
    gradients g and residuals r of N ranks, in a window of k exchanges

        due = mean over ranks of (r before + sum of g - r after),  delivered = sum of the results

    are equal up to rounding, whatever the codec sends in a single step (Seide et al. 2014, section
    3). A codec without residuals has rounding errors here. The relative error is
    |delivered - due| / |due|. Buckets take turns, a window each.

    It costs one all-reduce of the bucket in each window, which the run's payload and times include,
    and memory of twice the bucket. No host waits: results are read when they have arrived.

    Args:
        exchange, comm, worker: of the sync that calls this object.
        every: exchanges of a window, k.
    """

    def __init__(self, exchange: Exchange, comm: Comm, worker: Worker, every: int) -> None:
        self.exchange, self.comm, self.worker, self.every = exchange, comm, worker, every
        self._findings = Findings(
            f"exchange={type(exchange).__name__}", comm, f"in the {every} exchanges up to step"
        )
        self.restart()

    def restart(self) -> None:
        """Forget the window under way: buckets are planned anew."""
        self._names: dict[str, None] = {}  # of buckets, in the order in which they were seen
        self._begin("")

    def _begin(self, name: str) -> None:
        """Begin a window of the bucket `name`; of the first that comes if it is empty."""
        self._name, self._count = name, 0
        self._due = self._delivered = torch.empty(0)
        self._spans: list[tuple[str, int, int]] = []
        self._left_out: set[str] = set()
        self._step = 0

    def before(self, bucket: GradBucket) -> None:
        """Add a bucket that is about to be averaged to what is due."""
        name = str(bucket)
        self._names.setdefault(name)
        self._name = self._name or name
        if name != self._name:
            return
        if not self._count:
            self._due, self._delivered = self._residual(bucket), torch.zeros_like(bucket.flat)
        self._due.add_(bucket.flat, alpha=self.comm.size if bucket.divided else 1)

    def after(self, bucket: GradBucket) -> None:
        """Add a bucket that holds the mean to what is delivered."""
        if str(bucket) != self._name:
            return
        self._delivered += bucket.flat
        self._count += 1
        self._step = bucket.step
        if self._count == self.every:
            self._due -= self._residual(bucket)
            self._spans = list(bucket.spans())

    def leave_out(self, names: Iterable[str]) -> None:
        """Leave parameters out of the window under way, before `end_step`; alike on all ranks.

        No rank reached them in this step, so what they were delivered is taken away again, and
        what the exchange keeps of them is put back.
        """
        self._left_out.update(names)

    def end_step(self) -> None:
        """Compare, if a window is full; all ranks call this once the exchanges of a step are done.

        Raises:
            Exception: the first error of the comparison.
        """
        self._findings.read_arrived()
        if self._count < self.every:
            return
        self.worker.submit(f"drift of bucket {self._name}", self._compare)
        self.worker.wait()
        names = [*self._names]
        self._begin(names[(names.index(self._name) + 1) % len(names)])

    def results(self) -> list[dict[str, Any]]:
        """Return what each window found: its bucket, last step, error, cosine, and alarm or not."""
        return self._findings.all()

    def _residual(self, bucket: GradBucket) -> Tensor:
        """Return this rank's residuals of a bucket, laid out like `bucket.flat`."""
        kept = GradBucket(bucket.shapes, torch.zeros_like(bucket.flat))
        self.exchange.add_residual(kept, self.comm)
        return kept.flat

    def _compare(self) -> Iterator[Collective]:
        yield self.comm.iall_reduce(self._due)
        due, delivered = self._due.div_(self.comm.size), self._delivered
        for name, start, end in self._spans:
            if name in self._left_out:
                due[start:end] = delivered[start:end] = 0
        self._findings.compare(f"bucket {self._name}", self._step, due, delivered)
