"""The order of training samples, and each rank's share of it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lab.settings import checks


class GlobalSampler:
    """This rank's share of an endless stream of samples that does not depend on the world size.

    The stream is one permutation of all samples after another, the one of epoch e drawn from
    (seed, e). Global batch k begins at sample `start + k * batch_size` of the stream, so it may
    straddle epochs and is never cut short. Rank r owns the r-th of `world_size` equal slices of it.

    Args:
        num_samples: samples of one epoch.
        batch_size: global batch size.
        rank, world_size: the share to yield.
        seed: of all permutations.
        start: samples of the stream that earlier runs have used.

    Raises:
        ValueError: an argument out of range, or a batch that ranks cannot share evenly.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        rank: int,
        world_size: int,
        seed: int,
        start: int = 0,
    ) -> None:
        for name, value, least in (
            ("num_samples", num_samples, 1),
            ("batch_size", batch_size, 1),
            ("world_size", world_size, 1),
            ("seed", seed, 0),
            ("start", start, 0),
        ):
            checks.whole(name, value, least)
        if not 0 <= rank < world_size:
            raise ValueError(f"rank={rank}: must be from 0 to {world_size - 1}")
        if batch_size % world_size:
            raise ValueError(f"batch_size={batch_size}: must be a multiple of {world_size} ranks")
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.seed = seed
        self.per_rank_batch_size = batch_size // world_size
        self.first = start + rank * self.per_rank_batch_size
        self._epoch = -1
        self._permutation = np.empty(0, dtype=np.int64)

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield this rank's batches: epoch and index of each sample, int64 [per-rank batch]."""
        position = self.first
        while True:
            yield self._slice(position, position + self.per_rank_batch_size)
            position += self.batch_size

    def _slice(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        epochs, offsets = np.divmod(np.arange(begin, end), self.num_samples)
        touched = range(int(epochs[0]), int(epochs[-1]) + 1)
        parts = [self._order(epoch)[offsets[epochs == epoch]] for epoch in touched]
        return epochs, np.concatenate(parts)

    def _order(self, epoch: int) -> np.ndarray:
        """Return the permutation int64 [num_samples] of `epoch`, and keep it for the next call."""
        if epoch != self._epoch:
            generator = np.random.default_rng([self.seed, epoch])
            self._epoch, self._permutation = epoch, generator.permutation(self.num_samples)
        return self._permutation
