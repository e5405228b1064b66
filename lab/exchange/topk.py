"""Top-k: the largest values travel, each with its index."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from lab.codec.topk import codec as topk
from lab.distributed.collective import Collective
from lab.distributed.comm import Comm
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
        counts = self.counts(bucket)
        word = bucket.flat.new_empty(0, dtype=torch.int32)
        message = bucket.buffers["outgoing"].take(word, 2, sum(counts))
        indices = message[0].split(counts)
        values = message[1].view(torch.float32).split(counts)
        for (name, start, stop), *places in zip(bucket.spans(), indices, values, strict=True):
            gradient = bucket.flat[start:stop]
            topk.encode(gradient, self.residual_of(name, gradient), *places, offset=start)
        received = bucket.buffers["received"].take(word, comm.size, 2, sum(counts))
        yield comm.iall_gather(received, message)
        topk.decode(received, bucket.flat)
