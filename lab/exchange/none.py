"""No exchange: the ceiling with which every strategy is compared."""

from __future__ import annotations

from lab.distributed.comm import Comm
from lab.exchange.base import ADDED, Exchange
from lab.exchange.bucket import GradBucket
from lab.exchange.cost import Costs, Needs, Sizes


class NoExchange(Exchange):
    """No averaging: every rank keeps its own gradient and replicas drift apart. For timing only.

    It follows `--variable_update=independent` of tf_cnn_benchmarks.
    """

    dtypes = ADDED
    exact = False
    keeps_replicas_equal = False
    staged = True

    def average(self, bucket: GradBucket, comm: Comm) -> None:
        """Move nothing."""

    def add_cost(self, costs: Costs) -> bool:
        return True

    def memory_bytes(self, sizes: Sizes) -> Needs:
        return Needs()

    def asynchronous(self, comm: Comm) -> bool:
        return True
