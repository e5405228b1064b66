"""DoubleBuffer: the exchange of one step's gradients runs during the whole next step."""

from __future__ import annotations

from typing import Self

from torch import Tensor

from lab.distributed.comm import Sent
from lab.exchange.bucket import BucketPlan
from lab.settings import checks
from lab.sync import pattern
from lab.sync.base import SyncParts, SyncState, all_finite
from lab.sync.gradsync import GradSync


class DoubleBuffer(GradSync):
    """A sync that exchanges all gradients after backward, and waits there or one step later.

    With `double_buffer` the update of step t uses the mean gradient of step t-1, while that of t
    travels during step t+1: CNTK's useBufferedAsyncGradientAggregation (AllReduceDistGradAggregator
    ::AggregateGradients), which Seide et al. 2014 call double buffering. The first step updates
    nothing, and the last step's gradient is never applied.

    Args:
        double_buffer: False waits as GradSync does. `overlap` must have the same value: it chooses
            a worker that runs while the rank computes.

    Raises:
        ValueError: `double_buffer` is not a bool, or differs from `overlap`.
    """

    def __init__(self, parts: SyncParts, *, double_buffer: bool) -> None:
        checks.truth("sync.double_buffer", double_buffer)
        if double_buffer and not parts.overlap:
            raise ValueError("overlap=false: must be sync.double_buffer, which is true")
        super().__init__(parts, pattern.double_buffer(double_buffer))
        self.double_buffer = double_buffer
        self.arriving: dict[str, Tensor] = {}  # the last step's gradients; means once received
        self._sent = 0, 0, 0

    def _use(self, buckets: list[BucketPlan]) -> None:
        super()._use(buckets)
        self._resting = [bucket.twin() for bucket in buckets]  # for every second step

    def __enter__(self) -> Self:
        if not self.double_buffer:
            return super().__enter__()
        self._sent = super().sent()
        for parameter in self.parameters.values():
            self._on_gradient(parameter, lambda _: self.worker.advance())
        return self

    def finish(self) -> Tensor | None:
        """Begin to exchange this step's gradients; leave the previous step's means in `grad`."""
        if not self.double_buffer:
            return super().finish()
        self._all_ready()
        self.settle()
        if self.drift:
            self.drift.end_step()
        finite = all_finite(bucket.finite for bucket in self._exchanged)
        self.buckets, self._resting = self._resting, self.buckets
        self._begin_step()
        self._submit_rest()
        arrived, self.arriving = self.arriving, {}
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:  # None: it has no values
                self.arriving[name] = parameter.grad
            parameter.grad = arrived.get(name)
        self.step += 1
        return finite

    def sent(self) -> Sent:
        return self._sent if self.double_buffer else super().sent()

    def settle(self) -> None:
        self.worker.wait()
        for name in self._reached.nowhere() if self._reached else ():
            del self.arriving[name]
        self._sent = super().sent()  # later, an exchange under way may have sent a part

    def state_dict(self) -> SyncState:
        """Return GradSync's state and the means that the next step will use. Settle first."""
        return {**super().state_dict(), "arriving": dict(self.arriving)}

    def load_state_dict(self, state: SyncState) -> None:
        super().load_state_dict(state)
        if self.double_buffer:
            self.arriving = state.get("arriving", {})
