"""The global order of samples, and its division among ranks."""

from __future__ import annotations

from itertools import islice

import pytest

from lab.data import GlobalSampler
from tests.support import refusing

Sample = tuple[int, int]


def batches(sampler: GlobalSampler, num_batches: int) -> list[list[Sample]]:
    return [
        list(zip(epochs.tolist(), indices.tolist(), strict=True))
        for epochs, indices in islice(sampler, num_batches)
    ]


def stream(num_batches: int, world_size: int = 1, **changes: int) -> list[Sample]:
    """Return the samples of the first global batches, joined from all ranks in rank order."""
    arguments = {"num_samples": 30, "batch_size": 12, "seed": 5} | changes
    ranks = [
        batches(GlobalSampler(rank=r, world_size=world_size, **arguments), num_batches)
        for r in range(world_size)
    ]
    return [sample for parts in zip(*ranks, strict=True) for part in parts for sample in part]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_no_world_size_changes_the_global_order(world_size: int) -> None:
    assert stream(9, world_size) == stream(9)


def test_every_epoch_has_every_sample_once_though_batches_straddle_epochs() -> None:
    samples = stream(10)  # 120 samples: 4 epochs of 30
    for epoch in range(4):
        part = samples[30 * epoch : 30 * (epoch + 1)]
        assert sorted(part) == [(epoch, index) for index in range(30)]


def test_a_batch_larger_than_the_data_spans_several_epochs() -> None:
    samples = stream(1, world_size=2, num_samples=5, batch_size=20)
    assert sorted(samples) == [(epoch, index) for epoch in range(4) for index in range(5)]


def test_epochs_are_shuffled_differently() -> None:
    indices = [index for _, index in stream(5)]
    assert indices[:30] != sorted(indices[:30])
    assert indices[:30] != indices[30:]


def test_the_seed_alone_decides_the_order() -> None:
    assert stream(3) == stream(3)
    assert stream(3) != stream(3, seed=6)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("batch_size", [12, 20])
def test_start_resumes_exactly_with_any_world_and_batch_size(
    world_size: int, batch_size: int
) -> None:
    whole = stream(9)
    rest = stream(3, world_size, batch_size=batch_size, start=48)
    assert rest == whole[48 : 48 + 3 * batch_size]


def test_iterating_anew_begins_anew() -> None:
    sampler = GlobalSampler(30, 12, rank=1, world_size=2, seed=0)
    assert batches(sampler, 9) == batches(sampler, 9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 10, "world_size": 4}, "batch_size=10: must be a multiple of 4, the number"),
        ({"num_samples": 0}, "num_samples=0: must be an integer of at least 1"),
    ],
)
def test_refuses_in_one_line(changes: dict[str, int], message: str) -> None:
    arguments = {"num_samples": 30, "batch_size": 12, "rank": 0, "world_size": 1, "seed": 0}
    with refusing(message):
        GlobalSampler(**arguments | changes)
