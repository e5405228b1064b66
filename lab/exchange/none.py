"""No exchange: the ceiling that every strategy is measured against."""

from __future__ import annotations

from lab.distributed.comm import Comm
from lab.exchange.base import Exchange
from lab.exchange.bucket import GradBucket


class NoExchange(Exchange):
    """Every rank keeps its own gradient, so the replicas drift apart: for timing alone.

    The ancestor is `--variable_update=independent` of tf_cnn_benchmarks.
    """

    exact = False
    keeps_replicas_equal = False

    def average(self, bucket: GradBucket, comm: Comm) -> None:
        """Move nothing."""

    def asynchronous(self, comm: Comm) -> bool:
        return True
