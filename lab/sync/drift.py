"""Drift: does an exchange deliver, in time, what ranks give it?"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lab.distributed.collective import Collective
from lab.distributed.comm import Comm
from lab.distributed.worker import Worker
from lab.exchange.base import Exchange
from lab.exchange.bucket import GradBucket

# Of what was due in a window. Error feedback leaves rounding (1e-4 at most), and a codec without it
# that is meant to be used, as int8 or bf16, less than 5 %; a wrong scale, a residual that is lost
# and rows in the wrong place exceed 25 %.
LIMIT = 0.1


@dataclass
class Found:
    """The result of a window, on its way to the host.

    Attributes:
        values: relative error and cosine, float32 [2].
        ready: the event after which the host may read them; None: at once.
    """

    bucket: str
    step: int
    values: Tensor
    ready: torch.cuda.Event | torch.Event | None


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
        self._coming: deque[Found] = deque()
        self._read: list[dict[str, Any]] = []
        self.restart()

    def restart(self) -> None:
        """Forget the window under way: buckets are planned anew."""
        self._names: dict[str, None] = {}  # of buckets, in the order in which they were seen
        self._begin("")

    def _begin(self, name: str) -> None:
        """Begin a window of the bucket `name`; of the first that comes if it is empty."""
        self._name, self._count = name, 0
        self._due = self._delivered = torch.empty(0)
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

    def end_step(self) -> None:
        """Compare, if a window is full; all ranks call this once the exchanges of a step are done.

        Raises:
            Exception: the first error of the comparison.
        """
        self._read_arrived()
        if self._count < self.every:
            return
        self.worker.submit(f"drift of bucket {self._name}", self._compare)
        self.worker.wait()
        names = [*self._names]
        self._begin(names[(names.index(self._name) + 1) % len(names)])

    def results(self) -> list[dict[str, Any]]:
        """Return what each window found: its bucket, last step, error, cosine, and alarm or not."""
        for found in self._coming:
            if found.ready is not None:
                found.ready.synchronize()
        self._read_arrived()
        return self._read

    def _residual(self, bucket: GradBucket) -> Tensor:
        """Return this rank's residuals of a bucket, laid out like `bucket.flat`."""
        kept = GradBucket(bucket.shapes, torch.zeros_like(bucket.flat))
        self.exchange.add_residual(kept, self.comm)
        return kept.flat

    def _compare(self) -> Iterator[Collective]:
        yield self.comm.iall_reduce(self._due)
        due, delivered = self._due.div_(self.comm.size), self._delivered
        size, least = _norm(due), torch.finfo(due.dtype).tiny
        cosine = due.dot(delivered) / torch.clamp(size * _norm(delivered), min=least)
        error = _norm(delivered.sub_(due)) / torch.clamp(size, min=least)
        values = torch.stack([error, cosine]).to("cpu", non_blocking=True)
        on_gpu = due.device.type == "cuda"
        ready = torch.cuda.current_stream(due.device).record_event() if on_gpu else None
        self._coming.append(Found(self._name, self._step, values, ready))

    def _read_arrived(self) -> None:
        while self._coming and ((ready := self._coming[0].ready) is None or ready.query()):
            found = self._coming.popleft()
            error, cosine = (float(value) for value in found.values)
            alarm = error > LIMIT  # never of NaN: gradients that are not finite end the run
            if alarm and not any(earlier["alarm"] for earlier in self._read):
                self._warn(found, error, cosine)
            where = {"bucket": found.bucket, "step": found.step}
            self._read.append({**where, "error": error, "cosine": cosine, "alarm": alarm})

    def _warn(self, found: Found, error: float, cosine: float) -> None:
        if self.comm.rank == 0:
            name = type(self.exchange).__name__
            text = (
                f"exchange={name}: drift in bucket {found.bucket}: what it delivered in the "
                f"{self.every} exchanges up to step {found.step} is off by {error:.1%} of what was "
                f"due (cosine {cosine:.3f}); expected is less than {LIMIT:.0%}"
            )
            warnings.warn_explicit(text, UserWarning, __name__, 0)  # shows no line of source


def _norm(flat: Tensor) -> Tensor:
    return flat.square().sum().sqrt()
