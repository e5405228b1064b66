"""Random-k: all ranks draw the same indices, so that values travel without them."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

from lab.codec.randomk import codec as randomk
from lab.distributed.collective import Collective
from lab.distributed.comm import Comm
from lab.exchange.bucket import GradBucket
from lab.exchange.sparse import Sparse


class RandomK(Sparse):
    """The same random values on all ranks, and error feedback (Stich et al. 2018, Algorithm 1).

    The draw (lab.codec.randomk.codec) depends on seed, step and parameter name alone, so that ranks
    agree and a resumed run draws the same. A rank sends 8(k+1)(N-1)/N bytes: one more value tells
    whether all gradients were finite.

    Args:
        ratio, error_feedback: see Sparse.
        seed: of the draw.

    Raises:
        ValueError: an argument out of range.
    """

    def __init__(self, ratio: float = 0.3, error_feedback: bool = True, seed: int = 0) -> None:
        super().__init__(ratio, error_feedback)
        if not isinstance(seed, int):
            raise ValueError(f"exchange.seed={seed}: must be an integer")
        self.seed = seed

    def stages(self, bucket: GradBucket, comm: Comm) -> Iterator[Collective]:
        counts = self.counts(bucket)
        message = bucket.buffers["message"].take(bucket.flat, sum(counts) + 1)
        probe = message[-1].zero_()  # or NaN if any value is not finite, drawn or not
        values = message[:-1].split(counts)
        gradients = {name: bucket.flat[start:stop] for name, start, stop in bucket.spans()}
        for (name, gradient), sent in zip(gradients.items(), values, strict=True):
            seed = self._seed(name, bucket.step)
            randomk.encode(gradient, self.residual_of(name, gradient), sent, probe, seed)
        yield comm.iall_reduce(message)
        bucket.finite = probe.isfinite()
        message.div_(comm.size)
        for (name, gradient), mean in zip(gradients.items(), values, strict=True):
            randomk.decode(mean, gradient, self._seed(name, bucket.step))

    def _seed(self, name: str, step: int) -> int:
        return zlib.crc32(f"{self.seed} {step} {name}".encode())
