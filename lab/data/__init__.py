"""Data sets, each of which fulfils the protocol Data: those in memory; and the order of samples.

All are made with `seed`, of what is random in them (a split never is), and `device`, where samples
are kept or batches go. They refuse, by a ValueError of one line that names the setting, arguments
out of range and files that are missing, damaged or of another form.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from lab.settings import checks
from lab.settings.errors import one_line


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
        ValueError: there are no samples, or ranks cannot share a batch evenly.
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
        checks.integer("num_samples", num_samples, 1)
        if batch_size % world_size:
            raise ValueError(
                f"batch_size={batch_size}: must be a multiple of {world_size}, the number of ranks"
            )
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


def rank_batches(num_samples: int, rank: int, world_size: int, batch_size: int) -> Iterator[range]:
    """Yield the samples rank::world_size, at most `batch_size` at a time: see Data.test_batches."""
    own = range(rank, num_samples, world_size)
    for start in range(0, len(own), batch_size):
        yield own[start : start + batch_size]


class TensorData:
    """Inputs and targets that are already on the device.

    Args:
        train: inputs [num_train, ...] and targets [num_train, ...].
        test: the same with [num_test, ...].
        unit, num_classes, vocabulary: see Data.

    Raises:
        ValueError: samples to test on have another shape than those to train on.
    """

    def __init__(
        self,
        train: tuple[Tensor, Tensor],
        test: tuple[Tensor, Tensor],
        *,
        unit: str,
        num_classes: int | None,
        vocabulary: int | None = None,
    ) -> None:
        for name, *parts in zip(("inputs", "targets"), train, test, strict=True):
            shapes = [list(part.shape[1:]) for part in parts]
            if shapes[0] != shapes[1]:
                raise ValueError(
                    f"data: {name} have shape {shapes[0]} in the samples to train on, and "
                    f"{shapes[1]} in those to test on; they must be the same"
                )
        self._train, self._test = train, test
        self.num_train, self.num_test = len(train[0]), len(test[0])
        self.unit, self.input_dtype = unit, train[0].dtype
        self.input_shape: tuple[int, ...] = tuple(train[0].shape[1:])
        self.num_classes, self.vocabulary = num_classes, vocabulary

    def targets(self) -> tuple[Tensor, Tensor]:
        """See Data. Return all targets."""
        return self._train[1], self._test[1]

    def train_batches(self, sampler: GlobalSampler) -> Iterator[tuple[Tensor, Tensor]]:
        """See Data. Indices are on the device a step before they are needed."""
        inputs, targets = self._train
        places = (to_device(indices, inputs.device) for _, indices in sampler)
        for here, _ in pairwise(places):
            yield inputs[here], targets[here]

    def test_batches(
        self, rank: int, world_size: int, batch_size: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """See Data."""
        inputs, targets = self._test
        for own in rank_batches(self.num_test, rank, world_size, batch_size):
            part = slice(own.start, own.stop, own.step)
            yield inputs[part], targets[part]


def image_data(
    images: Tensor, targets: Tensor, num_test: int, device: torch.device, num_classes: int | None
) -> TensorData:
    """Place images and their targets on the device, the last `num_test` of them to test on."""
    images, targets = images.to(device), targets.to(device)
    train, test = slice(None, -num_test), slice(-num_test, None)
    parts = (images[train], targets[train]), (images[test], targets[test])
    return TensorData(*parts, unit="image", num_classes=num_classes)


def to_device(values: np.ndarray, device: torch.device) -> Tensor:
    """Return `values` on `device`: on a CPU the same memory, else an asynchronous copy.

    Only pinned memory can be copied asynchronously. It may be freed at once: torch's allocator does
    not reuse it before the device has read it.
    """
    tensor = torch.from_numpy(values)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def existing(path: str | None, layout: str) -> Path:
    """Return the file or folder of `data.path`.

    Args: layout: a clause that says what to give.

    Raises:
        ValueError: it is not set, or there is no such file or folder.
    """
    if not path:
        raise ValueError(f"data.path is not set; {layout}")
    found = Path(str(path)).expanduser()
    if not found.exists():
        raise ValueError(f"data.path={path}: no such file or folder; {layout}")
    return found


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Turn any error of a reader of `file` into one line that names the file.

    Raises:
        ValueError: it cannot be read, or is no regular file.
    """
    if file.exists() and not file.is_file():  # of a pipe, a reader would wait for ever
        raise ValueError(f"data.path={file}: not a regular file")
    try:
        yield
    except Exception as error:  # readers raise many types: of zip, of Arrow, of the system
        raise ValueError(f"data.path={file}: cannot be read: {one_line(error)}") from None


def held_out(test_share: object) -> float:
    """Return the share of the data to test on. ValueError: it is not a number between 0 and 1."""
    return checks.number("data.test_share", test_share, above=0, below=1)
