"""Exchanges that do not leave the mean: each has one fault that lab.certificate must name."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from lab.distributed.comm import Collective, Comm
from lab.exchange.allreduce import AllReduce
from lab.exchange.base import Exchange
from lab.exchange.bucket import GradBucket
from lab.exchange.compressed import Int8, OneBit


class Mean(Exchange):
    """The mean of gathered gradients, in rank order, times a factor."""

    def average(self, bucket: GradBucket, comm: Comm) -> None:
        mean = self.gathered(bucket, comm).mean(dim=0)
        bucket.flat.copy_(mean * self.factor(comm.size))

    def gathered(self, bucket: GradBucket, comm: Comm) -> Tensor:
        heard = bucket.flat.new_empty(comm.size, len(bucket.flat))
        comm.all_gather(heard, bucket.flat)
        return heard

    def factor(self, size: int) -> float:
        return 1.0


class Summed(Mean):
    """The sum."""

    def factor(self, size: int) -> float:
        return size


class DividedTwice(Mean):
    """The mean, divided by the number of ranks again."""

    def factor(self, size: int) -> float:
        return 1 / size


class Scaled(Mean):
    """The mean, times a factor that no number of ranks explains."""

    def factor(self, size: int) -> float:
        return 1.5


class NotExchanged(Mean):
    """Each rank's own gradient; bytes travel in vain."""

    def average(self, bucket: GradBucket, comm: Comm) -> None:
        self.gathered(bucket, comm)


class WrongGroup(Mean):
    """The mean over ranks 0 and 1, and over all others."""

    def average(self, bucket: GradBucket, comm: Comm) -> None:
        heard = self.gathered(bucket, comm)
        group = heard[:2] if comm.rank < 2 else heard[2:]
        bucket.flat.copy_(group.mean(dim=0))


class Stale(Mean):
    """From the second step on, the mean of the step before."""

    def __init__(self) -> None:
        self.last: dict[str, Tensor] = {}

    def average(self, bucket: GradBucket, comm: Comm) -> None:
        super().average(bucket, comm)
        name = next(iter(bucket.shapes))
        mean = bucket.flat.clone()
        if (before := self.last.get(name)) is not None and len(before) == len(mean):
            bucket.flat.copy_(before)
        self.last[name] = mean


class Momentum(Mean):
    """The mean at first, and momentum later; it states no bound on what it leaves out."""

    exact = False

    def __init__(self) -> None:
        self.last: dict[str, Tensor] = {}

    def average(self, bucket: GradBucket, comm: Comm) -> None:
        super().average(bucket, comm)
        for name, start, stop in bucket.spans():
            own = bucket.flat[start:stop]
            own += self.last.get(name, 0.0)
            self.last[name] = own.clone()


class Unwritten(Mean):
    """A buffer that nothing was written to."""

    def average(self, bucket: GradBucket, comm: Comm) -> None:
        self.gathered(bucket, comm)
        bucket.flat.zero_()


class OneBucketLeftOut(Mean):
    """The bucket that holds the first parameter stays as it is."""

    def average(self, bucket: GradBucket, comm: Comm) -> None:
        if "0.weight" in bucket.shapes or "first.weight" in bucket.shapes:
            return
        super().average(bucket, comm)


class OneValueOff(Mean):
    """One value of one parameter is another on rank 1."""

    def average(self, bucket: GradBucket, comm: Comm) -> None:
        super().average(bucket, comm)
        if comm.rank == 1:
            bucket.flat[0] += 0.01 * bucket.flat.norm()


class Bypassed(Mean):
    """The mean, but sent around the Comm, which counts no byte."""

    def average(self, bucket: GradBucket, comm: Comm) -> None:
        before = comm.traffic.payload_bytes, comm.traffic.num_messages
        super().average(bucket, comm)
        comm.traffic.payload_bytes, comm.traffic.num_messages = before


class Apart(NotExchanged):
    """Means that ranks may not share, as of neighbours, and says so."""

    keeps_replicas_equal = False


class Uncompressed(OneBit):
    """1-bit SGD that sends all values as they are."""

    def stages(self, bucket: GradBucket, comm: Comm) -> Iterator[Collective]:
        yield comm.iall_reduce(bucket.flat)
        bucket.flat.div_(comm.size)


class SummedAfter(Exchange):
    """The sum of the exchange that comes after it in a class's bases."""

    def stages(self, bucket: GradBucket, comm: Comm) -> Iterator[Collective]:
        yield from super().stages(bucket, comm)
        bucket.flat.mul_(comm.size)


class SummedOneBit(SummedAfter, OneBit):
    """1-bit SGD whose sum is not divided."""


class SummedInt8(SummedAfter, Int8):
    """ByteGrad whose mean is multiplied by the number of ranks."""


class ForgetsResidual(OneBit):
    """1-bit SGD that loses a part of its residual in each step."""

    def stages(self, bucket: GradBucket, comm: Comm) -> Iterator[Collective]:
        yield from super().stages(bucket, comm)
        for _, _, values in self.memory.residuals():
            values[: len(values) // 8].zero_()


class DividedBFloat16(AllReduce):
    """An all-reduce in bfloat16 that is divided twice."""

    def stages(self, bucket: GradBucket, comm: Comm) -> Iterator[Collective]:
        yield from super().stages(bucket, comm)
        bucket.flat.div_(comm.size)


class OwnInt8(Int8):
    """ByteGrad that is ignored: gradients stay as they are."""

    def stages(self, bucket: GradBucket, comm: Comm) -> Iterator[Collective]:
        own = bucket.flat.clone()
        yield from super().stages(bucket, comm)
        bucket.flat.copy_(own)
