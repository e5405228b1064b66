"""No exchange: the ceiling with which every strategy is compared."""

from __future__ import annotations

from lab.distributed.comm import Comm
from lab.exchange.base import ADDED, Exchange
from lab.exchange.bucket import GradBucket


class NoExchange(Exchange):
    """No averaging: every rank keeps its own gradient and replicas drift apart. For timing only.

    It follows `--variable_update=independent` of tf_cnn_benchmarks.
    """

    dtypes = ADDED
    exact = False
    keeps_replicas_equal = False

    def average(self, bucket: GradBucket, comm: Comm) -> None:
        """Move nothing."""

    def asynchronous(self, comm: Comm) -> bool:
        return True
