"""Exchanging weights every few steps: rounds, the outer optimizer, refused settings."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lab.distributed.comm import Collective, Comm, run_ranks
from lab.exchange.allreduce import AllReduce
from lab.exchange.bucket import GradBucket
from lab.measure.statistics import round_means
from lab.sync.gradsync import GradSync
from lab.sync.local import LocalSync
from lab.training.checkpoint import mean_state
from tests.support.steps import made, take_steps

LOCAL_SGD: dict[str, Any] = {"outer_lr": 1.0, "outer_momentum": 0.0}


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))


def networks(size: int) -> list[nn.Module]:
    """Make equal models before the ranks start: threads share the random state."""
    model = network()
    return [copy.deepcopy(model) for _ in range(size)]


local: Callable[..., LocalSync] = partial(made, LocalSync, every=4, **LOCAL_SGD)


def train(sync: GradSync, batches: Tensor, num_steps: int) -> None:
    """Train up to step `num_steps` on this rank's batches, [steps of the whole run, rows, 6]."""
    optimizer = torch.optim.SGD(sync.module.parameters(), lr=0.1, weight_decay=0.01)
    steps = range(sync.step, num_steps)
    take_steps(sync, optimizer, batches.__getitem__, steps, last=len(batches) - 1)


def weights(sync: GradSync) -> Tensor:
    return torch.cat([p.detach().flatten() for p in sync.module.parameters()])


@pytest.mark.parametrize("size", [1, 2, 3])
def test_rounds_of_one_step_are_what_averaging_gradients_gives(size: int) -> None:
    batches, models = torch.randn(size, 6, 4, 6), networks(size)

    def rank_main(comm: Comm) -> tuple[Tensor, Tensor]:
        other = copy.deepcopy(models[comm.rank])
        sync = local(models[comm.rank], comm, every=1)
        reference = made(GradSync, other, comm)
        for each in (sync, reference):
            with each:
                train(each, batches[comm.rank], 6)
        return weights(sync), weights(reference)

    for ours, theirs in run_ranks(size, rank_main):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "complex": torch.view_as_complex,
    "columns": lambda whole: whole[:, 1:, 0],
    "column-major": lambda whole: whole[:, :, 0].clone().T,
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_rounds_average_weights_of_any_layout(view: Callable[[Tensor], Tensor]) -> None:
    whole = torch.randn(2, 8, 4, 2)
    mean = torch.stack([view(each) for each in whole]).mean(dim=0)

    def rank_main(comm: Comm) -> Tensor:
        model = nn.Module()
        model.weight = nn.Parameter(view(whole[0].clone()))
        sync = local(model, comm, every=1)
        with sync:
            with torch.no_grad():
                model.weight.copy_(view(whole[comm.rank]))  # as a rank's own steps would leave it
            sync.finish()
            sync.after_update(last=True)
        return model.weight.detach().clone()

    for weight in run_ranks(2, rank_main):
        torch.testing.assert_close(weight, mean, rtol=1e-5, atol=1e-6)


def test_replicas_part_within_a_round_and_meet_at_its_end_and_at_the_last_step() -> None:
    batches, models = torch.randn(3, 10, 4, 6), networks(3)

    def rank_main(comm: Comm) -> list[Tensor]:
        sync, seen = local(models[comm.rank], comm), []
        with sync:
            for step in range(1, 11):
                train(sync, batches[comm.rank], step)
                seen.append((sync.keeps_replicas_equal, weights(sync), comm.traffic.num_messages))
        return seen

    first, *others = run_ranks(3, rank_main)
    for other in others:
        equal = [torch.equal(ours[1], theirs[1]) for ours, theirs in zip(first, other, strict=True)]
        assert [step for step, same in enumerate(equal, start=1) if same] == [4, 8, 10]
        assert equal == [claims for claims, *_ in other]
    messages = [count for *_, count in first]
    assert [b - a for a, b in zip([0, *messages], messages, strict=False)] == [
        0, 0, 0, 4, 0, 0, 0, 4, 0, 4,
    ]  # fmt: skip


def test_outer_optimizer_is_sgd_with_nesterov_momentum_on_the_mean_change() -> None:
    changes = torch.randn(3, 2, 4)  # rounds, ranks, values
    lr, momentum = 0.7, 0.9

    def rank_main(comm: Comm) -> Tensor:
        model = nn.Linear(4, 1, bias=False)
        nn.init.zeros_(model.weight)
        with local(model, comm, every=1, outer_lr=lr, outer_momentum=momentum) as sync:
            for change in changes[:, comm.rank]:
                model.weight.data -= change
                sync.after_update(last=False)
        return weights(sync)

    expected, velocity = torch.zeros(4), torch.zeros(4)
    for change in changes.mean(dim=1):  # Douillard et al. 2023, algorithm 1, lines 12 and 14
        velocity = momentum * velocity + change
        expected -= lr * (change + momentum * velocity)
    for result in run_ranks(2, rank_main):
        torch.testing.assert_close(result, expected)


def test_mean_of_states_keeps_types_and_memory_order() -> None:
    weight = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    states = [
        {"model": {"w": weight + rank, "count": torch.tensor(7)}, "lr": 0.1} for rank in (0, 1, 2)
    ]
    mean = mean_state(states)
    torch.testing.assert_close(mean["model"]["w"], weight + 1)
    assert mean["model"]["w"].stride() == weight.stride()
    assert torch.equal(mean["model"]["count"], torch.tensor(7))
    assert mean["lr"] == 0.1
    assert torch.equal(mean_state([states[0]] * 3)["model"]["w"], weight)


def test_what_an_exchange_finds_not_finite_is_told_and_shows_in_the_weights() -> None:
    class Looking(AllReduce):
        def stages(self, bucket: GradBucket, comm: Comm) -> Iterator[Collective]:
            yield from super().stages(bucket, comm)
            bucket.finite = bucket.flat.isfinite().all()

    models = networks(2)

    def rank_main(comm: Comm) -> tuple[bool, list[str]]:
        sync = local(models[comm.rank], comm, Looking(), every=1, outer_momentum=0.9)
        with sync, torch.no_grad():
            if comm.rank == 1:
                models[1][2].weight.fill_(torch.nan)  # type: ignore[index, union-attr]
            finite = sync.after_update(last=False)
        named = sync.module.named_parameters()
        assert finite is not None
        return bool(finite), [name for name, p in named if not p.isfinite().all()]

    assert run_ranks(2, rank_main) == [(False, ["2.weight"])] * 2


def test_statistics_are_over_whole_rounds() -> None:
    values = np.arange(12.0).reshape(1, 12) + np.array([[0.0], [100.0]])
    means = round_means(values, first=5, every=4)  # steps 5 to 16; rounds 8 to 11 and 12 to 15
    assert means.tolist() == [[4.5, 8.5], [104.5, 108.5]]
    assert round_means(values, first=5, every=1).tolist() == values.tolist()
    assert round_means(values[:, :3], first=5, every=4).shape == (2, 0)
    assert round_means(np.zeros((2, 9, 5)), first=0, every=3).shape == (2, 3, 5)
