"""Data sets; each fulfils the protocol Data.

All are made with `seed`, of what is random in them (a split never is), and `device`, where samples
are kept or batches go. They refuse, by a ValueError of one line that names the setting, arguments
out of range and files that are missing, damaged or of another form.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from lab.data.sampler import GlobalSampler


class Data(Protocol):
    """A data set: samples of an input and its target, on the device of the run.

    Attributes:
        unit: the name of one sample, as in "image".
        input_shape: shape of one input, (C, H, W) of an image.
        input_dtype: of inputs.
        num_classes: targets are indices from 0 to num_classes - 1; None: they are not indices.
        vocabulary: inputs are indices of tokens below it; None: they are not.
        num_train, num_test: number of samples of each part, over all ranks.

    It may also have `source`, a clause that says what was read: "1000 bytes of 2 files, /tmp/a";
    and `digest()`, a text that is equal where samples are, if reading a few by batches takes long.
    """

    unit: str
    input_shape: tuple[int, ...]
    input_dtype: torch.dtype
    num_classes: int | None
    vocabulary: int | None
    num_train: int
    num_test: int

    def targets(self) -> tuple[Tensor, Tensor]:
        """Return training and test targets [samples, ...], for a check before the first step.

        Subsets are enough if reading all of them would take long.
        """
        ...

    def train_batches(self, sampler: GlobalSampler) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield endless batches: inputs [samples, *input_shape] and targets [samples, ...].

        They hold this rank's samples in the order of `sampler`, and depend only on that and the
        seed of the data.
        """
        ...

    def test_batches(
        self, rank: int, world_size: int, batch_size: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield test samples rank::world_size once, at most `batch_size` at a time.

        Every sample comes once over all ranks; a rank may have none. Shapes are those of training.
        """
        ...
