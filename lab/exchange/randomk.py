"""Random-k: values at places that all ranks draw alike, so that they travel without indices."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import torch
from torch import Tensor

from lab.distributed.comm import Collective, Comm
from lab.exchange.bucket import GradBucket
from lab.exchange.sparse import Sparse


class RandomK(Sparse):
    """The same random values on all ranks, and error feedback (Stich et al. 2018, Algorithm 1).

    One value is drawn from each of k equal ranges of a tensor: without replacement, in k operations
    where a permutation takes n, and every value as probable as any other where k divides n. What is
    drawn depends on seed, step and the parameter's name alone, so that ranks agree and a resumed
    run draws the same.
    A rank sends 8(k+1)(N-1)/N bytes: one value says whether all gradients were finite. Meanwhile it
    holds the 8k bytes of where they belong.

    Args:
        ratio, error_feedback: see Sparse.
        seed: of the draw.

    Raises:
        ValueError: an argument out of range.
    """

    needs_like_gpus = True  # what a GPU draws depends on how many values it draws at once

    def __init__(self, ratio: float = 0.3, error_feedback: bool = True, seed: int = 0) -> None:
        super().__init__(ratio, error_feedback)
        if not isinstance(seed, int):
            raise ValueError(f"exchange.seed={seed}: must be an integer")
        self.seed = seed

    def stages(self, bucket: GradBucket, comm: Comm) -> Iterator[Collective]:
        # 0, or NaN where a value is not finite, which the values drawn need not show.
        probe = bucket.flat.sum(dim=0, keepdim=True).mul_(0)
        indices, values = self.take(bucket)
        message = torch.cat([values, probe])
        del values  # memory that would lie idle while the message travels
        yield comm.iall_reduce(message)
        bucket.finite = message[-1].isfinite()
        bucket.flat.index_copy_(0, indices, message[:-1].div_(comm.size))

    def choose(self, values: Tensor, count: int, name: str, step: int) -> Tensor:
        generator = torch.Generator(values.device)
        generator.manual_seed(zlib.crc32(f"{self.seed} {step} {name}".encode()))
        drawn = torch.randint(1 << 62, (count,), generator=generator, device=values.device)
        edges = torch.arange(count + 1, device=values.device) * len(values) // max(count, 1)
        return edges[:-1] + drawn % edges.diff()
