"""The communication library's own all-reduce."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from lab.distributed.comm import Collective, Comm
from lab.exchange.base import Staged
from lab.exchange.bucket import GradBucket

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class AllReduce(Staged):
    """Sum over the ranks by the library, on the wire as `dtype`, then divide by their number.

    Args:
        dtype: "float32", or for half the bytes "bfloat16" or "float16". The division comes first
            then, so that the sum of many ranks keeps the size of one gradient. float16 has three
            bits more, and a range of 6e-8 to 65504: above it is infinity, below it zero.

    Raises:
        ValueError: another dtype.
    """

    takes_divided = True

    def __init__(self, dtype: str = "float32") -> None:
        if dtype not in DTYPES:
            raise ValueError(f"exchange.dtype={dtype}: allowed are {', '.join(DTYPES)}")
        self.dtype = DTYPES[dtype]
        self.exact = self.dtype == torch.float32

    def stages(self, bucket: GradBucket, comm: Comm) -> Iterator[Collective]:
        if comm.size == 1:
            return
        bucket.divide(bucket.flat, comm.size)
        wire = bucket.flat.to(self.dtype)
        yield comm.iall_reduce(wire)
        if wire is not bucket.flat:
            bucket.flat.copy_(wire)
