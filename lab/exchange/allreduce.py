"""The library's all-reduce; and none, the ceiling with which every strategy is compared."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from lab.distributed.comm import Collective, Comm
from lab.exchange.base import ADDED, COMPRESSED, Exchange, Staged
from lab.exchange.bucket import GradBucket
from lab.exchange.cost import Costs, Needs, Sizes
from lab.settings import checks

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class AllReduce(Staged):
    """The library's all-reduce: sums gradients as `dtype`, divided by the number of ranks.

    Args:
        dtype: "float32": gradients travel in the dtype that they have. "bfloat16" and "float16"
            halve the bytes. Gradients are divided before they are summed, so that the sum stays in
            range. float16 has three more bits of precision, but its range is 6e-8 to 65504: larger
            values become infinite, smaller zero.
    """

    accepts_prescaled = True
    steady_from = 0

    def __init__(self, dtype: str = "float32") -> None:
        self.dtype = DTYPES[checks.one_of("exchange.dtype", dtype, DTYPES)]
        self.exact = self.dtype == torch.float32
        self.dtypes = ADDED if self.exact else COMPRESSED

    def error_bound(self, largest: float, size: int) -> float:
        return 0.0 if self.exact else rounding_bound(self.dtype, largest, size)

    def add_cost(self, costs: Costs) -> bool:
        if self.exact or costs.N == 1:  # one rank keeps what it has
            costs.wire(costs.exact(costs.n))
            return True
        half, cast = costs.num_bytes / 2, 1.5 * costs.num_bytes
        costs.codec(cast)
        costs.wire(costs.network.all_reduce(half))
        costs.codec(cast)
        return True

    def memory_bytes(self, sizes: Sizes) -> Needs:
        return Needs(kept=0 if self.exact or sizes.N == 1 else 2 * sizes.n)

    def stages(self, bucket: GradBucket, comm: Comm) -> Iterator[Collective]:
        if comm.size == 1:
            return
        bucket.divide(bucket.flat, comm.size)
        wire = bucket.flat
        if not self.exact:  # into memory that is kept: fresh pages cost more than the copy
            wire = bucket.plans.scratch("wire", wire.new_empty(0, dtype=self.dtype), len(wire))
            wire.copy_(bucket.flat)
        yield comm.iall_reduce(wire)
        if wire is not bucket.flat:
            bucket.flat.copy_(wire)


def rounding_bound(dtype: torch.dtype, largest: float, size: int) -> float:
    """Bound the error of a mean whose `size` summands and partial sums are rounded to `dtype`."""
    about = torch.finfo(dtype)
    smallest = about.tiny * about.eps  # below half of it a value becomes zero
    return size * (about.eps * largest + smallest) / 2


class NoExchange(Exchange):
    """No averaging: every rank keeps its own gradient and replicas drift apart. For timing only.

    It follows `--variable_update=independent` of tf_cnn_benchmarks.
    """

    dtypes = ADDED
    exact = False
    keeps_replicas_equal = False
    staged = True
    steady_from = 0

    def average(self, bucket: GradBucket, comm: Comm) -> None:
        """Move nothing."""

    def add_cost(self, costs: Costs) -> bool:
        return True

    def memory_bytes(self, sizes: Sizes) -> Needs:
        return Needs()

    def asynchronous(self, comm: Comm) -> bool:
        return True
