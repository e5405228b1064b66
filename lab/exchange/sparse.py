"""Base of sparsifying exchanges: some values of each tensor are sent, the others are kept."""

from __future__ import annotations

from lab.exchange.base import Staged
from lab.exchange.bucket import GradBucket
from lab.exchange.compressible import num_sent
from lab.exchange.error_feedback import ErrorFeedback


class Sparse(Staged, ErrorFeedback):
    """Sends k = ceil(ratio * n) of the n values of each parameter, and keeps the others.

    Args:
        ratio: above 0, at most 1.
        error_feedback: see ErrorFeedback.

    Raises:
        ValueError: an argument out of range.
    """

    def __init__(self, ratio: float, error_feedback: bool) -> None:
        super().__init__(error_feedback)
        if not isinstance(ratio, int | float) or not 0 < ratio <= 1:
            raise ValueError(f"exchange.ratio={ratio}: must be above 0 and at most 1")
        self.ratio = ratio

    def counts(self, bucket: GradBucket) -> list[int]:
        """Return how many values of each parameter are sent."""
        return [num_sent(shape, self.ratio) for shape in bucket.shapes.values()]
