"""Exchange: what moves between the ranks, and along which path."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from lab.distributed.comm import Collective, Comm
from lab.exchange.bucket import GradBucket


class Exchange(ABC):
    """Turns each rank's gradient into their mean. One object serves all buckets of a rank.

    `average` is plain synchronous code, or made of `stages` (see Staged). It may run inside
    backward, on a side stream or a worker thread: where it runs is not its concern. A gradient that
    is not finite must reach every rank as one that is not finite. What it does to this object's
    state is the trainer's to undo.
    """

    exact = True  # delivers the mean to rounding, which the tests then hold it to
    keeps_replicas_equal = True
    needs_send_recv = False  # of a Comm; not every one has them
    needs_like_gpus = False  # computes or draws the same on all ranks, where a bit more would tell
    takes_divided = False  # buckets of gradients that the loss has divided by N: saves a pass

    @abstractmethod
    def average(self, bucket: GradBucket, comm: Comm) -> None:
        """Replace `bucket.flat` by its mean over the ranks of `comm`. Called by all of them."""

    def asynchronous(self, comm: Comm) -> bool:
        """Whether `stages` leave all waiting to their caller."""
        return False

    def stages(self, bucket: GradBucket, comm: Comm) -> Iterator[Collective]:
        """As `average`: yields what it has begun, and goes on once that is done."""
        self.average(bucket, comm)
        yield from ()

    def flush_residual(self, bucket: GradBucket, comm: Comm) -> None:
        """Add this rank's residuals to `bucket.flat`, and forget them."""

    def choices(self) -> list[dict[str, Any]]:
        """Return the choices that this exchange made by itself, for the record."""
        return []

    def state_dict(self) -> dict[str, Any]:
        """Return the tensors that this rank keeps between steps, by parameter name."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned on the same rank of as many ranks."""

    def redistribute(self, states: list[dict[str, Any]], rank: int, size: int) -> dict[str, Any]:
        """This rank's state among `size` ranks, made of the states of another number of ranks."""
        return {}


class Staged(Exchange):
    """An exchange that is written as stages, so that others may go on while one waits.

    Ranks may be at different stages of different buckets: each stage must begin its collectives
    over other connections than the stages before (see Comm), or be the last that begins any.
    """

    def asynchronous(self, comm: Comm) -> bool:
        return comm.asynchronous

    def average(self, bucket: GradBucket, comm: Comm) -> None:
        for collective in self.stages(bucket, comm):
            collective.wait()

    @abstractmethod
    def stages(self, bucket: GradBucket, comm: Comm) -> Iterator[Collective]: ...


class Rooted(Exchange):
    """An exchange in two halves: the mean to rank 0, and from there to all.

    Attributes:
        in_halves: `to_root` and `from_root` may be used by themselves.
    """

    needs_send_recv = True
    takes_divided = True
    in_halves = True

    def average(self, bucket: GradBucket, comm: Comm) -> None:
        self.to_root(bucket, comm)
        self.from_root(bucket.flat, comm)

    @abstractmethod
    def to_root(self, bucket: GradBucket, comm: Comm) -> None:
        """Leave the mean over the ranks in rank 0's `bucket.flat`; the others' becomes void."""

    @abstractmethod
    def from_root(self, flat: Tensor, comm: Comm) -> None:
        """Replace `flat` by rank 0's."""
