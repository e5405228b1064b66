"""Top-k: the largest values travel, each with its index."""

from __future__ import annotations

from lab.codec.topk import TopK as Codec
from lab.exchange.coded import AllGather
from lab.exchange.memory import Memory


class TopK(AllGather):
    """The k values of largest magnitude, with error feedback (Stich et al. 2018, Algorithm 1).

    This is Deep Gradient Compression (Lin et al. 2018) without momentum correction and warm-up.
    Ranks choose different values, so every rank receives all of them: it sends 8k(N-1) bytes, an
    int32 index and a float32 value each, and adds in rank order.

    Args:
        ratio: k is this share of the values of each parameter, rounded up.
        error_feedback: see Memory.

    Raises:
        ValueError: an argument out of range.
    """

    def __init__(self, ratio: float = 0.01, error_feedback: bool = True) -> None:
        super().__init__(Codec(ratio), Memory(error_feedback))
        self.ratio = ratio
