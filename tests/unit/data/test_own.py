"""Data that users bring: tensors, arrays and data sets of torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, default_collate

from lab.data import GlobalSampler, own
from lab.data.own import as_data
from lab.data.synthetic import synthetic

CPU = torch.device("cpu")


class Squares(Dataset[tuple[float, int]]):
    """Sample i: its number, and the class i % 3."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.reads = 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Any, int]:
        if not 0 <= index < self.count:
            raise IndexError(index)
        self.reads += 1
        return np.array([index, index * index], dtype=np.float64), index % 3


class Named(Squares):
    """The same, with what data sets of torchvision say of themselves."""

    classes = ("a", "b", "c", "d")


def whole(data: Any) -> tuple[list[float], list[float]]:
    """Return the first numbers of all training and of all test samples, over two ranks."""
    sampler = GlobalSampler(data.num_train, data.num_train, 0, 1, seed=0)
    train, _ = next(iter(data.train_batches(sampler)))
    test = [batch for rank in range(2) for batch, _ in data.test_batches(rank, 2, 3)]
    return sorted(train[:, 0].tolist()), sorted(torch.cat(test)[:, 0].tolist())


@pytest.mark.parametrize(
    "value",
    [
        Squares(40),
        (torch.arange(40.0)[:, None], torch.arange(40) % 3),
        (np.arange(40.0)[:, None], np.arange(40, dtype=np.int32) % 3),
        (np.arange(40.0)[:, None], np.arange(40, dtype=np.uint16) % 3),
    ],
    ids=["data set", "tensors", "arrays", "unsigned"],
)
def test_every_tenth_sample_is_held_out(value: Any) -> None:
    data = as_data(value, CPU, "data=mine")
    train, test = whole(data)
    assert test == list(range(0, 40, 10)) and sorted(train + test) == list(range(40))
    assert (data.num_train, data.num_test, data.num_classes) == (36, 4, 3)
    assert data.input_dtype == torch.float32 and data.targets()[0].dtype == torch.int64


@pytest.mark.parametrize("inputs", [torch.eye(20).requires_grad_() * 1, torch.eye(20).to_sparse()])
def test_inputs_need_no_gradient_and_are_dense(inputs: Tensor) -> None:
    data = as_data((inputs, torch.zeros(20)), CPU, "data=mine")
    batch, _ = next(iter(data.train_batches(GlobalSampler(18, 18, 0, 1, seed=0))))
    assert not batch.requires_grad and batch.sum() == 18


def test_two_parts_are_used_as_they_are() -> None:
    data = as_data((Squares(6), Squares(3)), CPU, "data=mine")
    assert whole(data) == ([0, 1, 2, 3, 4, 5], [0, 1, 2])


def test_ranks_share_a_batch_of_a_data_set() -> None:
    data = as_data((Squares(8), Squares(1)), CPU, "data=mine")
    parts = [GlobalSampler(8, 8, rank, 2, seed=1) for rank in range(2)]
    numbers = [next(iter(data.train_batches(part)))[0][:, 0].tolist() for part in parts]
    assert sorted(numbers[0] + numbers[1]) == list(range(8))


def test_classes_are_counted_without_all_inputs_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    def collate(samples: list[Any]) -> Any:
        sizes.append(len(samples))
        return default_collate(samples)

    monkeypatch.setattr(own, "default_collate", collate)
    data = as_data((Squares(300), Squares(3)), CPU, "data=mine")
    assert data.num_classes == 3 and len(data.targets()[0]) == 300
    assert max(sizes) < 100


def test_classes_that_a_data_set_names_are_not_counted() -> None:
    train = Named(500)
    data = as_data((train, Named(3)), CPU, "data=mine")
    assert data.num_classes == 4 and train.reads < 100


def test_ids_as_inputs_and_targets_are_tokens() -> None:
    ids = torch.arange(60).view(10, 6) % 7
    data = as_data((ids[:, :-1], ids[:, 1:]), CPU, "data=mine")
    assert (data.vocabulary, data.unit, data.input_shape) == (7, "sequence", (5,))


def test_numbers_as_targets_have_no_classes() -> None:
    inputs = torch.rand(30, 1, 4, 4)
    data = as_data((inputs, inputs.sum((1, 2, 3)).double()), CPU, "data=mine")
    assert data.num_classes is None and data.unit == "image" and data.vocabulary is None
    assert data.targets()[1].dtype == torch.float32


def test_data_of_the_labs_own_form_is_left_alone() -> None:
    data = synthetic(seed=0, device=CPU, num_images=8)
    assert as_data(data, CPU, "data=mine") is data
    object.__setattr__(data, "num_test", None)
    with pytest.raises(ValueError, match="^data=mine: lacks num_test "):
        as_data(data, CPU, "data=mine")


def test_targets_that_a_data_set_lists_are_used_if_its_samples_have_them() -> None:
    class Listed(Squares):
        targets = [index % 3 for index in range(300)]

    class Transformed(Listed):
        def __getitem__(self, index: int) -> tuple[Any, int]:
            inputs, target = super().__getitem__(index)
            return inputs, target + 2

    listed, transformed = Listed(300), Transformed(300)
    assert as_data((listed, Squares(3)), CPU, "data=mine").num_classes == 3
    assert listed.reads < 300
    assert as_data((transformed, Squares(3)), CPU, "data=mine").num_classes == 5


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (3, "type int"),
        (torch.zeros(3, 2), r"type Tensor of shape \[3, 2\]"),
        ((torch.zeros(3), torch.zeros(4)), r"type tuple \(Tensor, Tensor\)"),
        ((torch.tensor(1.0), torch.tensor(2.0)), r"type tuple \(Tensor, Tensor\)"),
        ((np.array(["a", None]), torch.zeros(2)), r"type tuple \(ndarray, Tensor\)"),
    ],
)
def test_other_values_are_refused_by_one_line(value: Tensor | int, named: str) -> None:
    with pytest.raises(ValueError, match=rf"^data=mine: returned {named}; it must return"):
        as_data(value, CPU, "data=mine")


@pytest.mark.parametrize(
    ("sample", "named"),
    [
        (3, "int"),
        ({"x": 1, "y": 2}, "dict"),
        ((1, 2, 3), r"tuple \(int, int, int\)"),
        (("a", 1), r"tuple \(str, int\)"),
    ],
)
def test_samples_that_are_no_pairs_of_numbers_are_refused(sample: Any, named: str) -> None:
    class Other(Squares):
        def __getitem__(self, index: int) -> Any:
            return sample

    for value in (Other(20), (Squares(20), Other(20))):
        with pytest.raises(
            ValueError, match=f"^data=mine: a sample is of type {named}; it must be"
        ):
            as_data(value, CPU, "data=mine")


@pytest.mark.parametrize("other", [torch.zeros(7), "a", None])
def test_samples_that_fit_into_no_batch_are_refused_by_one_line(other: Any) -> None:
    class Ragged(Squares):
        def __getitem__(self, index: int) -> Any:
            inputs, target = super().__getitem__(index)
            return (inputs, target) if index < 15 else (other, target)

    with pytest.raises(ValueError, match="^data=mine: samples do not fit into one batch: .*same"):
        as_data((Ragged(20), Squares(20)), CPU, "data=mine")


def test_a_stream_of_samples_is_refused_even_if_it_has_a_length() -> None:
    class Stream(IterableDataset[Any]):
        def __len__(self) -> int:
            return 20

        def __iter__(self) -> Any:
            return iter(())

    with pytest.raises(ValueError, match="^data=mine: returned type Stream; it must return"):
        as_data(Stream(), CPU, "data=mine")


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (Squares(1), "1"),
        ((Squares(5), Squares(0)), "5 and 0"),
        ((torch.zeros(1, 3), torch.zeros(1).long()), "1"),
        (((torch.zeros(3, 3), torch.zeros(3)), (torch.zeros(0, 3), torch.zeros(0))), "3 and 0"),
    ],
)
def test_too_few_samples_for_two_parts_are_refused(value: Any, found: str) -> None:
    with pytest.raises(ValueError, match=rf"^data=mine: returned too few samples \({found}\)"):
        as_data(value, CPU, "data=mine")
