"""Random-k: all ranks draw the same indices, so that values travel without them."""

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
    instead of a permutation's n, and with equal probability for all values if k divides n. The draw
    depends on seed, step and parameter name alone, so that ranks agree and a resumed run draws the
    same. A rank sends 8(k+1)(N-1)/N bytes: one more value tells whether all gradients were finite.
    Meanwhile it holds 8k bytes of indices.

    Args:
        ratio, error_feedback: see Sparse.
        seed: of the draw.

    Raises:
        ValueError: an argument out of range.
    """

    needs_like_gpus = True  # a GPU's draw depends on how many values it draws at once

    def __init__(self, ratio: float = 0.3, error_feedback: bool = True, seed: int = 0) -> None:
        super().__init__(ratio, error_feedback)
        if not isinstance(seed, int):
            raise ValueError(f"exchange.seed={seed}: must be an integer")
        self.seed = seed

    def stages(self, bucket: GradBucket, comm: Comm) -> Iterator[Collective]:
        # 0, or NaN if any value is not finite: the drawn values alone need not show it.
        probe = bucket.flat.sum(dim=0, keepdim=True).mul_(0)
        indices, values = self.take(bucket)
        message = torch.cat([values, probe])
        del values  # their memory would lie idle while the message travels
        yield comm.iall_reduce(message)
        bucket.finite = message[-1].isfinite()
        bucket.flat.index_copy_(0, indices, message[:-1].div_(comm.size))

    def choose(self, values: Tensor, count: int, name: str, step: int) -> Tensor:
        generator = torch.Generator(values.device)
        generator.manual_seed(zlib.crc32(f"{self.seed} {step} {name}".encode()))
        drawn = torch.randint(1 << 62, (count,), generator=generator, device=values.device)
        edges = torch.arange(count + 1, device=values.device) * len(values) // max(count, 1)
        return edges[:-1] + drawn % edges.diff()
