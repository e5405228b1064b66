"""DES-LOC: averages of weights and moments, their bytes, and Local Adam as a special case."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from lab.distributed.comm import Comm, run_ranks
from lab.exchange.paths import Ring
from lab.sync import pattern
from lab.sync.local import DesLoc
from tests.support.steps import made, take_steps
from tests.unit.sync.test_local import networks

PERIODS: dict[str, Any] = {"every": 2, "first_every": 6, "second_every": 12}
MOMENTS = ("exp_avg", "exp_avg_sq")


des_loc: Callable[..., DesLoc] = partial(made, DesLoc, **PERIODS)


def adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=0.01)


def train(sync: DesLoc, optimizer: Optimizer, batches: Tensor, num_steps: int) -> None:
    """Train up to step `num_steps` on this rank's batches, [steps of the whole run, rows, 6]."""
    steps = range(sync.step, num_steps)
    take_steps(sync, optimizer, batches.__getitem__, steps, last=len(batches) - 1)


def kept(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return copies of a rank's weights, and of both moments."""
    parameters = list(model.parameters())
    moments = {k: [optimizer.state[p][k] for p in parameters] for k in MOMENTS}
    lists = {"weights": [p.detach() for p in parameters], **moments}
    return {kind: torch.cat([t.flatten() for t in each]) for kind, each in lists.items()}


def local_adam(model: nn.Module, comm: Comm, batches: Tensor, every: int) -> dict[str, Tensor]:
    """Cheng and Glasgow 2025, "Local Adam", literally: every `every` steps all becomes its mean."""
    optimizer = adamw(model)
    for step, batch in enumerate(batches, start=1):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % every == 0:
            for parameter in model.parameters():
                state = optimizer.state[parameter]
                for value in (parameter.detach(), *(state[kind] for kind in MOMENTS)):
                    comm.all_reduce(value.div_(comm.size))
    return kept(model, optimizer)


@pytest.mark.parametrize(("size", "bucket_mb"), [(1, None), (3, None), (3, 1e-5)])
def test_equal_periods_are_local_adam_bit_for_bit(size: int, bucket_mb: float | None) -> None:
    batches, models = torch.randn(size, 12, 4, 6), networks(size)
    equal: dict[str, Any] = {**dict.fromkeys(PERIODS, 4), "bucket_mb": bucket_mb}

    def rank_main(comm: Comm) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        other, mine = copy.deepcopy(models[comm.rank]), batches[comm.rank]
        optimizer = adamw(models[comm.rank])
        with des_loc(models[comm.rank], comm, **equal) as sync:
            train(sync, optimizer, mine, 12)
        return kept(models[comm.rank], optimizer), local_adam(other, comm, mine, 4)

    for ours, theirs in run_ranks(size, rank_main):
        for kind in theirs:
            assert torch.equal(ours[kind], theirs[kind]), kind


def test_each_kind_is_equal_on_all_ranks_after_its_own_steps() -> None:
    batches, models = torch.randn(3, 13, 4, 6), networks(3)

    def rank_main(comm: Comm) -> list[tuple[bool, dict[str, Tensor]]]:
        model, seen = models[comm.rank], []
        optimizer = adamw(model)
        with des_loc(model, comm, Ring(None)) as sync:
            for step in range(1, 14):
                train(sync, optimizer, batches[comm.rank], step)
                seen.append((sync.keeps_replicas_equal, kept(model, optimizer)))
        return seen

    by_rank = run_ranks(3, rank_main)
    met: dict[str, list[int]] = {"weights": [], "exp_avg": [], "exp_avg_sq": []}
    for step, states in enumerate(zip(*by_rank, strict=True), start=1):
        for kind, steps in met.items():
            if all(torch.equal(state[kind], states[0][1][kind]) for _, state in states):
                steps.append(step)
        assert {claims for claims, _ in states} == {step in met["weights"]}
    assert met == {"weights": [2, 4, 6, 8, 10, 12, 13], "exp_avg": [6, 12], "exp_avg_sq": [12]}


@pytest.mark.parametrize("periods", [(3, 4, 6), (5, 10, None)])
def test_bytes_are_an_exchange_times_the_sum_of_rates(periods: tuple[int, int, int | None]) -> None:
    num_steps, size = 60, 3
    batches, models = torch.randn(size, num_steps, 2, 6), networks(size)
    settings: dict[str, Any] = dict(zip(PERIODS, periods, strict=True))

    def rank_main(comm: Comm) -> int:
        with des_loc(models[comm.rank], comm, **settings) as sync:
            train(sync, adamw(models[comm.rank]), batches[comm.rank], num_steps)
        return comm.traffic.payload_bytes

    one = 2 * sum(p.nbytes for p in models[0].parameters()) * (size - 1) / size
    rate = sum(1 / period for period in periods if period)
    for payload in run_ranks(size, rank_main):
        assert payload / num_steps == pytest.approx(rate * one, rel=0.01)


def test_momentum_of_sgd_is_a_first_moment() -> None:
    models = networks(2)
    batches = torch.randn(2, 9, 4, 6)  # the last step averages weights alone

    def rank_main(comm: Comm) -> list[list[Tensor]]:
        model, seen = models[comm.rank], []
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        with des_loc(model, comm, second_every=None) as sync:
            for steps in (6, 9):
                train(sync, optimizer, batches[comm.rank], steps)
                state = [optimizer.state[p]["momentum_buffer"].clone() for p in model.parameters()]
                seen.append(state)
        return seen

    (met, parted), (others_met, others_parted) = run_ranks(2, rank_main)
    assert all(map(torch.equal, met, others_met))
    assert not any(map(torch.equal, parted, others_parted))


def test_a_round_goes_on_from_its_state_bit_for_bit() -> None:
    batches, models, others = torch.randn(2, 13, 4, 6), networks(2), networks(2)

    def rank_main(comm: Comm) -> list[dict[str, Tensor]]:
        first, second = (each[comm.rank] for each in (models, others))
        sync, resumed = des_loc(first, comm), des_loc(second, comm)
        ours, theirs = adamw(first), adamw(second)
        with sync:
            train(sync, ours, batches[comm.rank], 7)
            state = copy.deepcopy((first.state_dict(), ours.state_dict(), sync.state_dict()))
            train(sync, ours, batches[comm.rank], 13)
        second.load_state_dict(state[0])
        theirs.load_state_dict(state[1])
        resumed.load_state_dict(state[2])
        resumed.step = 7
        with resumed:
            train(resumed, theirs, batches[comm.rank], 13)
        return [kept(first, ours), kept(second, theirs)]

    for whole, resumed in run_ranks(2, rank_main):
        assert all(torch.equal(whole[kind], resumed[kind]) for kind in whole)


@pytest.mark.parametrize(
    ("momentum", "settings", "message"),
    [
        (0.9, {}, "sync.second_every=12: SGD has no exp_avg_sq; use optim=adamw, or set null"),
        (0.0, {"second_every": None}, "sync.first_every=6: SGD has no exp_avg or momentum_buff"),
    ],
)
def test_an_optimizer_without_moments_is_refused(
    momentum: float, settings: dict[str, Any], message: str
) -> None:
    (model,) = networks(1)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=momentum)

    def rank_main(comm: Comm) -> None:
        train(des_loc(model, comm, **settings), optimizer, torch.randn(2, 4, 6), 1)

    with pytest.raises(ValueError, match=re.escape(message)):
        run_ranks(1, rank_main)


def test_periods_that_do_not_divide_each_other_have_a_common_round() -> None:
    for periods in itertools.product((2, 3, 4), repeat=3):
        found = pattern.des_loc(*periods)
        assert found.num_exchanges / found.every == pytest.approx(sum(1 / p for p in periods))
