"""The communication library's own all-reduce."""

from __future__ import annotations

import torch
from torch import Tensor

from lab.distributed.comm import Collective, Comm
from lab.exchange.bucket import Bucket
from lab.exchange.exchange import Exchange

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class AllReduce(Exchange):
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

    def average(self, bucket: Bucket, comm: Comm) -> None:
        if comm.size == 1:
            return
        wire = _share(bucket, comm).to(self.dtype)
        comm.all_reduce(wire)
        if wire is not bucket.flat:
            bucket.flat.copy_(wire)

    def asynchronous(self, comm: Comm) -> bool:
        return self.exact and comm.asynchronous

    def start(self, bucket: Bucket, comm: Comm) -> Collective | None:
        if comm.size == 1 or not self.asynchronous(comm):
            return self.average(bucket, comm)
        return comm.iall_reduce(_share(bucket, comm))


def _share(bucket: Bucket, comm: Comm) -> Tensor:
    """This rank's part of the mean, in the bucket itself."""
    return bucket.flat if bucket.divided else bucket.flat.div_(comm.size)
