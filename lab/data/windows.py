"""Sequences of token ids: the windows of two long arrays, to train and to test on."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from lab.data.files import held_out
from lab.data.sampler import GlobalSampler
from lab.data.tensors import to_device
from lab.settings import checks

NUM_CHECKED = 64  # windows of each part whose targets a task sees before the first step


class Windows:
    """Windows of `context` ids, each with the ids that follow them one position later as targets.

    Windows follow each other without overlap, so every id but the first is predicted once in an
    epoch; what is left at the end and shorter is not used. Arrays stay where they are, in memory or
    in a mapped file: a batch is gathered on the host and copied to the device a step early.

    Args:
        train, test: token ids, of any integer type, [ids].
        context: ids of a window.
        vocabulary: ids are below it.
        device: where batches go.
        source: see lab.data.Data.

    Raises:
        ValueError: `context` is not an integer of at least 1, or a part is shorter than a window.
    """

    def __init__(
        self,
        train: np.ndarray,
        test: np.ndarray,
        *,
        context: int,
        vocabulary: int,
        device: torch.device,
        source: str,
    ) -> None:
        checks.whole("data.context", context, 1)
        for part, ids in (("train", train), ("test", test)):
            if len(ids) <= context:
                raise ValueError(
                    f"data.context={context}: there are only {len(ids)} tokens to {part} on; a "
                    "window and the token after it need more"
                )
        self._train, self._test, self._device = train, test, device
        self.num_train, self.num_test = ((len(ids) - 1) // context for ids in (train, test))
        self.unit, self.source = "sequence", source
        self.input_shape: tuple[int, ...] = (context,)
        self.input_dtype = torch.int64
        self.num_classes: int | None = vocabulary
        self.vocabulary: int | None = vocabulary
        self._offsets = np.arange(context + 1)

    def targets(self) -> tuple[Tensor, Tensor]:
        """See lab.data.Data. Return those of at most 64 windows, evenly spaced, of each part."""
        return self._some(self._train, self.num_train), self._some(self._test, self.num_test)

    def train_batches(self, sampler: GlobalSampler) -> Iterator[tuple[Tensor, Tensor]]:
        """See lab.data.Data. ValueError: an id is not below the vocabulary."""
        windows = (self._gather(self._train, indices) for _, indices in sampler)
        placed = (to_device(batch, self._device) for batch in windows)
        for batch, _ in pairwise(placed):
            yield _shifted(batch)

    def test_batches(
        self, rank: int, world_size: int, batch_size: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """See lab.data.Data. ValueError: an id is not below the vocabulary."""
        stride = world_size * batch_size
        for start in range(rank, self.num_test, stride):
            indices = np.arange(start, min(start + stride, self.num_test), world_size)
            yield _shifted(to_device(self._gather(self._test, indices), self._device))

    def _some(self, ids: np.ndarray, num_windows: int) -> Tensor:
        indices = np.linspace(0, num_windows - 1, min(num_windows, NUM_CHECKED)).astype(np.int64)
        return torch.from_numpy(self._gather(ids, indices)[:, 1:])

    def _gather(self, ids: np.ndarray, indices: np.ndarray) -> np.ndarray:
        """Return windows and the id after each, int64 [windows, context + 1]."""
        begins = indices[:, None] * self.input_shape[0]
        windows = ids[begins + self._offsets].astype(np.int64)
        # An embedding on a GPU would end the process, without a word of the data.
        smallest, largest = windows.min(), windows.max()
        if smallest < 0 or largest >= (self.vocabulary or 0):
            wrong = largest if smallest >= 0 else smallest
            raise ValueError(
                f"data.vocabulary={self.vocabulary}: {self.source} contain the id {wrong}; ids "
                "must be from 0 to vocabulary - 1 (is data.dtype the type of the file?)"
            )
        return windows


def _shifted(batch: Tensor) -> tuple[Tensor, Tensor]:
    """Split windows [batch, context + 1] into inputs and targets, each [batch, context]."""
    return batch[:, :-1].contiguous(), batch[:, 1:].contiguous()


def split(ids: np.ndarray, test_share: object) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids to train on, and the last `test_share` of them to test on.

    Raises:
        ValueError: `test_share` is not a number between 0 and 1.
    """
    num_test = round(len(ids) * held_out(test_share))
    return ids[: len(ids) - num_test], ids[len(ids) - num_test :]
