"""Top-k: the largest values travel, each with its index."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lab.codec import topk
from lab.distributed.comm import Collective, Comm
from lab.exchange.bucket import GradBucket
from lab.exchange.sparse import Sparse


class TopK(Sparse):
    """The k values of largest magnitude, with error feedback (Stich et al. 2018, Algorithm 1).

    This is Deep Gradient Compression (Lin et al. 2018) without momentum correction and warm-up.
    Ranks choose different values, so every rank receives all of them: it sends 8k(N-1) bytes, an
    int32 index and a float32 value each, and adds in rank order.

    Args:
        ratio, error_feedback: see Sparse.
    """

    def __init__(self, ratio: float = 0.01, error_feedback: bool = True) -> None:
        super().__init__(ratio, error_feedback)

    def stages(self, bucket: GradBucket, comm: Comm) -> Iterator[Collective]:
        indices, values = self.take(bucket)
        message = torch.cat([indices.int(), values.view(torch.int32)])
        received = message.new_empty(comm.size, 2, len(values))
        yield comm.iall_gather(received, message)
        # No rank sends an index twice, so additions have a fixed order on a GPU too.
        for places, theirs in received:
            bucket.flat.index_add_(0, places, theirs.view(torch.float32), alpha=1 / comm.size)

    def choose(self, values: Tensor, count: int, name: str, step: int) -> Tensor:
        return topk.largest(values, count)
