"""Which sample is when, and whose."""

from __future__ import annotations

from collections.abc import Iterator

import torch

Sample = tuple[int, int]  # epoch, index into the data


class GlobalSampler:
    """Deals an endless stream of samples to the ranks, batch by batch.

    The stream is one permutation of the data after another, drawn from (seed, epoch). A global
    batch is its next `batch_size` samples, and rank r takes the r-th of `world_size` equal
    slices. So the order does not depend on the number of ranks, and nothing is dropped: a batch
    that an epoch's end falls into is filled from the next one.

    Args:
        num_samples: of the data.
        batch_size: global.
        rank, world_size: whose slice.
        seed: of all permutations.
        start: samples of the stream that are already done.

    Raises:
        ValueError: the batch does not divide evenly, or there are no samples.
    """

    def __init__(
        self,
        *,
        num_samples: int,
        batch_size: int,
        rank: int,
        world_size: int,
        seed: int,
        start: int = 0,
    ) -> None:
        if num_samples < 1:
            raise ValueError("data: has no training samples")
        if batch_size % world_size:
            raise ValueError(f"batch_size={batch_size}: does not divide into {world_size} ranks")
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.start = start
        self._epoch = -1
        self._order: list[int] = []

    def __iter__(self) -> Iterator[list[Sample]]:
        """This rank's part of each global batch."""
        share = self.batch_size // self.world_size
        position = self.start + self.rank * share
        while True:
            yield [self._sample(position + offset) for offset in range(share)]
            position += self.batch_size

    def _sample(self, position: int) -> Sample:
        epoch, place = divmod(position, self.num_samples)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(hash((self.seed, epoch)) % 2**63)
            self._order = torch.randperm(self.num_samples, generator=generator).tolist()
            self._epoch = epoch
        return epoch, self._order[place]
