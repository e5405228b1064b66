"""A user's own data: tensors, or data sets of torch, as the trainer needs them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, default_collate

from lab.data import Data, GlobalSampler, TensorData, rank_batches
from lab.settings.errors import one_line

HOLD_OUT = 10  # without a test part, one sample in this many is for testing
CHECKED = 64  # targets to look at where they cannot tell the number of classes anyway
KINDS = "biufc"  # of NumPy's numbers
# What Data has that is never None.
NEEDED = ("unit", "input_shape", "input_dtype", "num_train", "num_test", "targets", "test_batches")
Pair = tuple[Tensor, Tensor]


def as_data(value: Any, device: torch.device, setting: str) -> Data:
    """Return what a user's callable made as data to train on.

    Args:
        value: an object with the members of lab.data.Data, which is returned unchanged; inputs and
            targets, as tensors or arrays [samples, ...]; a torch data set whose samples are such
            pairs; or two of either, to train and to test on. Of one alone, every tenth sample is
            held out for testing. float64 becomes float32; int32 and uint16 to uint64 become int64.
        device: where batches go.
        setting: names the data in errors, as "data=mydata.Digits".

    Raises:
        ValueError: it is none of these, or has too few samples for two parts.
    """
    if hasattr(value, "train_batches"):
        if lacking := [name for name in NEEDED if getattr(value, name, None) is None]:
            raise ValueError(f"{setting}: lacks {', '.join(lacking)} (see lab.data.Data)")
        return value
    parts = value if isinstance(value, tuple | list) and len(value) == 2 else (value, None)
    if all(_is_array(part) for part in parts):
        parts = (value, None)
    train, test = parts
    if _is_pair(train) and (test is None or _is_pair(test)):
        _require_samples(setting, *(len(part[0]) for part in (train, test) if part is not None))
        return _tensor_data(_pair(train), None if test is None else _pair(test), device, value)
    if _is_data_set(train) and (test is None or _is_data_set(test)):
        parts = [part for part in (train, test) if part is not None]
        _require_samples(setting, *map(len, parts))
        for part in parts:
            _require_pair(setting, part[0])
        return DataSetData(train, test, device, setting)
    raise ValueError(
        f"{setting}: returned {_named(value)}; it must return (inputs, targets) as tensors, a "
        "torch data set of such pairs, or two of these: one to train on and one to test on"
    )


class DataSetData:
    """Samples that torch data sets load one by one, in this process.

    Args:
        train, test: data sets with a length, whose samples are an input and its target; without
            `test`, every tenth sample of `train` is held out. Attributes `num_classes` or
            `classes`, `vocabulary` and `unit` of `train` are used if it has them; without the
            first two, integer targets are all read once to count the classes.
        device: where batches go.
        setting: names the data in errors.
    """

    def __init__(self, train: Any, test: Any, device: torch.device, setting: str) -> None:
        self._setting, self._parts = setting, (train, train if test is None else test)
        self._places = _places(len(train)) if test is None else (None, None)
        self._device = device
        self.num_train, self.num_test = (
            len(data) if places is None else len(places)
            for data, places in zip(self._parts, self._places, strict=True)
        )
        inputs, targets = self._load(0, range(1))
        self.input_shape, self.input_dtype = tuple(inputs.shape[1:]), inputs.dtype
        self.num_classes = _known_classes(train)
        indices = not targets.is_floating_point()
        count = None if indices and self.num_classes is None else CHECKED
        self._targets = tuple(self._some_targets(part, count) for part in (0, 1))
        if indices and self.num_classes is None:
            self.num_classes = 1 + int(max(part.max() for part in self._targets))
        self.vocabulary = getattr(train, "vocabulary", None) or _vocabulary(
            inputs, self.num_classes
        )
        self.unit = getattr(train, "unit", None) or _unit(inputs, self.vocabulary)

    def targets(self) -> Pair:
        """See lab.data.Data."""
        return cast(Pair, self._targets)

    def train_batches(self, sampler: GlobalSampler) -> Iterator[Pair]:
        """See lab.data.Data."""
        for _, indices in sampler:
            yield self._load(0, indices)

    def test_batches(self, rank: int, world_size: int, batch_size: int) -> Iterator[Pair]:
        """See lab.data.Data."""
        for own in rank_batches(self.num_test, rank, world_size, batch_size):
            yield self._load(1, own)

    def _load(self, part: int, indices: Sequence[int] | np.ndarray) -> Pair:
        data, places = self._parts[part], self._places[part]
        chosen = indices if places is None else [places[index] for index in indices]
        samples = [data[int(index)] for index in chosen]
        try:
            inputs, targets = map(_usual, default_collate(samples))
        except (RuntimeError, TypeError, ValueError) as error:
            raise ValueError(
                f"{self._setting}: samples do not fit into one batch: {one_line(error)}; all "
                "inputs must have the same shape and type, and so must all targets"
            ) from None
        return inputs.to(self._device), targets.to(self._device)

    def _some_targets(self, part: int, count: int | None) -> Tensor:
        """Return the targets of the first `count` samples of a part; None: of all."""
        number = (self.num_train, self.num_test)[part]
        data, places = self._parts[part], self._places[part]
        known = getattr(data, "targets", None)
        if known is not None and count is None:  # as data sets of torchvision have them
            every = _usual(torch.as_tensor(known))
            every = every if places is None else every[torch.as_tensor(places)]
            # Those of a data set with a target_transform are not its samples'.
            if torch.equal(every[:CHECKED], self._some_targets(part, CHECKED)):
                return every
        first = range(number if count is None else min(count, number))
        batches = (first[start : start + CHECKED] for start in first[::CHECKED])
        return torch.cat([self._load(part, batch)[1] for batch in batches])  # inputs may be large


def _require_samples(setting: str, *counts: int) -> None:
    """Refuse parts, or one part alone, that leave no sample to train or to test on."""
    if min(counts) < 3 - len(counts):
        found = " and ".join(map(str, counts))
        raise ValueError(
            f"{setting}: returned too few samples ({found}); there must be at least one to train "
            "on and one to test on"
        )


def _require_pair(setting: str, sample: Any) -> None:
    """Refuse a sample of a data set that is no input and its target."""
    kinds = Tensor | np.ndarray | np.number | int | float
    listed = isinstance(sample, tuple | list) and len(sample) == 2
    if not listed or not all(isinstance(each, kinds) for each in sample):
        raise ValueError(
            f"{setting}: a sample is of {_named(sample)}; it must be a pair of an input and its "
            "target, each a tensor, an array or a number"
        )


def _tensor_data(train: Pair, test: Pair | None, device: torch.device, value: Any) -> TensorData:
    if test is None:
        kept, held_out = (torch.as_tensor(places) for places in _places(len(train[0])))
        inputs, targets = train
        train, test = (inputs[kept], targets[kept]), (inputs[held_out], targets[held_out])
    num_classes = _known_classes(value)
    if num_classes is None and not train[1].is_floating_point():
        num_classes = 1 + int(max(train[1].max(), test[1].max()))
    vocabulary = _vocabulary(train[0], num_classes)
    on_device = [(inputs.to(device), targets.to(device)) for inputs, targets in (train, test)]
    return TensorData(
        *on_device, unit=_unit(train[0], vocabulary), num_classes=num_classes, vocabulary=vocabulary
    )


def _places(count: int) -> tuple[list[int], list[int]]:
    """Return the indices of training and of held-out samples."""
    kept = [index for index in range(count) if index % HOLD_OUT]
    return kept, list(range(0, count, HOLD_OUT))


def _known_classes(value: Any) -> int | None:
    classes = getattr(value, "classes", None)
    return getattr(value, "num_classes", None) or (len(classes) if classes is not None else None)


def _vocabulary(inputs: Tensor, num_classes: int | None) -> int | None:
    """Return the number of token ids, where inputs are ids as targets are."""
    return num_classes if inputs.dtype == torch.int64 and inputs.ndim == 2 else None


def _unit(inputs: Tensor, vocabulary: int | None) -> str:
    """Name a sample, given a batch of inputs."""
    if vocabulary is not None:
        return "sequence"
    return "image" if inputs.ndim == 4 else "sample"


def _pair(value: Any) -> Pair:
    inputs, targets = map(_usual, value)
    return inputs, targets


def _usual(tensor: Any) -> Tensor:
    """Convert numbers to the types that models and losses take."""
    tensor = torch.as_tensor(tensor).detach().to_dense()
    usual = dict.fromkeys((torch.int32, torch.uint16, torch.uint32, torch.uint64), torch.int64)
    usual[torch.float64] = torch.float32
    return tensor.to(usual.get(tensor.dtype, tensor.dtype))


def _is_array(value: Any) -> bool:
    """Return whether a value is a tensor, or an array of numbers."""
    return isinstance(value, Tensor) or (
        isinstance(value, np.ndarray) and value.dtype.kind in KINDS
    )


def _is_pair(value: Any) -> bool:
    listed = isinstance(value, tuple | list) and len(value) == 2
    arrays = listed and all(_is_array(each) and each.ndim for each in value)
    return arrays and len(value[0]) == len(value[1])


def _is_data_set(value: Any) -> bool:
    others = tuple | list | str | dict | Tensor | np.ndarray | IterableDataset
    listed = isinstance(value, others)
    return hasattr(value, "__len__") and hasattr(value, "__getitem__") and not listed


def _named(value: Any) -> str:
    """Name the type of a value, and the shape of an array or the types in a short tuple."""
    shape, name = getattr(value, "shape", None), f"type {type(value).__name__}"
    if shape is not None:
        return f"{name} of shape {list(shape)}"
    if isinstance(value, tuple) and len(value) < 5:
        return f"{name} ({', '.join(type(each).__name__ for each in value)})"
    return name
