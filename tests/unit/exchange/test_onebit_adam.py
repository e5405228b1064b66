"""1-bit Adam against AdamW, and against arithmetic."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lab.exchange.onebit_adam import OneBitAdam
from tests.support.directions import Ledger, adam, deliver, num_values

SHAPES = {"fc": (24, 50), "bias": (24,), "conv": (6, 5, 3, 3), "table": (20, 32)}
NUM = num_values(SHAPES)
FREEZE = 10


def gradients(steps: int, size: int) -> Tensor:
    """Return gradients with a common part, of sizes that differ by row and column."""
    scale = torch.rand(NUM) + 0.5
    return scale * (torch.randn(steps, size, NUM) + 0.5 * torch.randn(NUM))


def make(**settings: Any) -> partial[OneBitAdam]:
    return partial(OneBitAdam, **{"block_size": 64, "freeze_at": FREEZE, **settings})


@pytest.mark.parametrize("size", [1, 3])
def test_until_it_is_frozen_the_run_is_adamws(size: int) -> None:
    given = gradients(FREEZE, size)
    weights = nn.Parameter(torch.randn(NUM))
    theirs, ours = weights, nn.Parameter(weights.detach().clone())
    adamw = torch.optim.AdamW([theirs], weight_decay=0.1)
    sgd = torch.optim.SGD([ours], weight_decay=0.1)
    directions = deliver(make(), SHAPES, given)[0].directions
    for step, (direction, gradient) in enumerate(zip(directions, given, strict=True)):
        for optimizer in (adamw, sgd):
            optimizer.param_groups[0]["lr"] = 0.01 / (step + 1)  # a schedule
        theirs.grad, ours.grad = gradient.mean(dim=0), direction
        adamw.step()
        sgd.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def owed(ledgers: list[Ledger]) -> Tensor:
    """Return what both residuals hold back, of gradients over the root: float64 [values]."""
    parts = []
    for name, columns in (("fc", 50), ("bias", 1), ("conv", 45), ("table", 32)):
        kept = [ledger.exchange.state_dict() for ledger in ledgers]
        ratio, second = (
            torch.cat([k[kind][name] for k in kept]).double()
            for kind in ("ratio", "shard_residual")
        )
        first = torch.stack([k["residual"][name].double() for k in kept]).sum(dim=0)
        held = (ratio * first + second).view(-1, columns)
        active = kept[0]["active"][name]
        rows = torch.zeros(len(active), columns, dtype=torch.float64)
        rows[active] = held
        parts.append(rows.flatten())
    return torch.cat(parts)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_delivered_and_residuals_make_the_true_sum(size: int) -> None:
    given = gradients(80, size)
    ledgers = deliver(make(freeze_at=40), SHAPES, given)  # no variance is far below its neighbours'
    truth = adam(given.mean(dim=1), 40)[40:].sum(dim=0)
    delivered = ledgers[0].directions[40:].double().sum(dim=0)
    assert (delivered + owed(ledgers) - truth).norm() <= 1e-5 * truth.norm()
    assert owed(ledgers).norm() > 0.01 * truth.norm()  # residuals make the sum right


@pytest.mark.parametrize("size", [1, 3])
def test_delivered_and_residuals_make_the_true_sum_of_gradients(size: int) -> None:
    given = gradients(80, size)
    ledgers = deliver(make(freeze_at=40, signs_of="gradient"), SHAPES, given)
    squares = given.mean(dim=1)[:40].double() ** 2
    weights = 0.001 * 0.999 ** torch.arange(39, -1, -1, dtype=torch.float64)
    variance = (weights[:, None] * squares).sum(dim=0) / weights.sum()
    truth = (given.mean(dim=1)[40:].double() / (variance.sqrt() + 1e-8)).sum(dim=0)
    corrections = 1 - 0.9 ** torch.arange(1, 81, dtype=torch.float64)[:, None]
    momenta = ledgers[0].directions.double() * corrections
    delivered = momenta[40:].sum(dim=0) + 9 * (momenta[-1] - momenta[39])  # undoes momentum
    assert (delivered + owed(ledgers) - truth).norm() <= 1e-4 * truth.norm()
    assert owed(ledgers).norm() > 0.01 * truth.norm()  # residuals make the sum right


def test_signs_of_gradients_leave_directions_as_long_as_adams_and_those_of_momentum_do_not() -> (
    None
):
    given = gradients(FREEZE + 100, 2)
    exact = adam(given.mean(dim=1), FREEZE)[FREEZE:].square().mean().item()
    power: dict[str, float] = {}
    for signs_of in ("gradient", "momentum"):
        directions = deliver(make(signs_of=signs_of), SHAPES, given)[0].directions[FREEZE:]
        power[signs_of] = directions.square().mean().item() / exact
    assert power["gradient"] == pytest.approx(1, rel=0.1)
    assert power["momentum"] > 2


def test_a_sum_is_not_enlarged_beyond_the_errors_of_its_signs() -> None:
    given = gradients(FREEZE + 30, 2)
    given[:, :, 7] *= 1e-4  # far below its row and column
    directions = deliver(make(), SHAPES, given)[0].directions[FREEZE:]
    assert directions[:, 7].abs().max() < 10


def test_a_first_gradient_after_freezing_is_counted_and_changes_nothing() -> None:
    given = gradients(FREEZE + 20, 2)
    given[:, :, NUM - 3 * 32 :] = 0
    given[FREEZE + 5 :, 1, NUM - 40 :] = 1e3  # on rank 1, of the last two rows
    ledgers = deliver(make(), SHAPES, given)
    assert not ledgers[0].directions[:, NUM - 3 * 32 :].any()
    assert ledgers[0].directions.abs().max() < 20
    assert [ledger.exchange.choices()[0]["late_rows"] for ledger in ledgers] == [0, 2]


SETTLES: dict[str, Any] = {"freeze_at": None, "settle_every": 5, "least_steps": 15}


def frozen_at(ledgers: list[Ledger]) -> int | None:
    (step,) = {ledger.exchange.choices()[0]["frozen_at"] for ledger in ledgers}
    return step


def test_it_freezes_by_itself_once_the_variance_has_settled() -> None:
    given = gradients(80, 3)
    growing = torch.linspace(1, 30, 80)[:, None, None] ** 2
    settings = {**SETTLES, "settle_below": 0.2}
    step = frozen_at(deliver(make(**settings), SHAPES, given))
    assert step is not None
    assert 15 < step < 60
    assert frozen_at(deliver(make(**settings), SHAPES, given * growing)) is None
    later = {**settings, "rate_warmup": step}
    again = frozen_at(deliver(make(**later), SHAPES, given))
    assert again is None or again > step


def test_the_ratio_is_the_one_that_is_documented() -> None:
    given = gradients(22, 2)
    exchange = deliver(make(**SETTLES, settle_below=0.01), SHAPES, given)[0].exchange
    squares = given.mean(dim=1).double() ** 2
    decay = 0.999 ** torch.arange(22, dtype=torch.float64).flip(0)[:, None]
    before, now = ((squares[:t] * decay[-t:]).sum(dim=0) / decay[-t:].sum(dim=0) for t in (15, 20))
    names = torch.cat([torch.arange(len(part)) % 16 == 0 for part in now.split(list(LENGTHS))])
    exact = ((now - before).abs()[names].sum() / now[names].sum()).item()
    assert exchange.criterion.ratio == pytest.approx(exact, rel=1e-4)


LENGTHS = [1200, 24, 270, 640]


def test_a_step_that_is_undone_leaves_no_trace() -> None:
    given = gradients(30, 2)
    settings = make(**SETTLES, settle_below=0.5)
    ledgers = deliver(settings, SHAPES, given[:20])
    before = [ledger.exchange.snapshot() for ledger in ledgers]
    bad = given[20:21].clone()
    bad[0, 1, 3] = torch.nan
    spoiled = deliver(settings, SHAPES, bad, before, 20)
    for ledger, state in zip(spoiled, before, strict=True):
        ledger.exchange.load_state_dict(state)
    states = [ledger.exchange.state_dict() for ledger in spoiled]
    after = deliver(settings, SHAPES, given[20:], states, 21)
    assert torch.equal(after[0].directions, deliver(settings, SHAPES, given)[0].directions[20:])


def sums(states: list[dict[str, Any]], kind: str, name: str) -> Tensor:
    return torch.stack([state[kind][name].double() for state in states]).sum(dim=0)


@pytest.mark.parametrize("signs_of", ["momentum", "gradient"])
def test_other_numbers_of_ranks_keep_momentum_and_sums_of_residuals(signs_of: str) -> None:
    given, made = gradients(FREEZE + 10, 4), make(signs_of=signs_of)
    states = [ledger.exchange.state_dict() for ledger in deliver(made, SHAPES, given)]
    for old, size in pairwise((4, 2, 3)):
        new = [made().redistribute(states, rank, size) for rank in range(size)]
        for name in SHAPES:
            summed = ("momentum", "residual") if signs_of == "momentum" else ("residual",)
            for kind in summed:
                torch.testing.assert_close(sums(new, kind, name), sums(states, kind, name))
            if signs_of == "gradient":
                assert torch.equal(new[-1]["momentum"][name], states[0]["momentum"][name])
            for kind in ("ratio", "shard_residual"):
                then = torch.cat([state[kind][name] for state in states])
                now = torch.cat([state[kind][name] for state in new])
                assert torch.equal(then, now)
        assert len(states) == old
        ledgers = deliver(made, SHAPES, gradients(5, size), new, FREEZE + 10)
        states = [ledger.exchange.state_dict() for ledger in ledgers]


def test_before_freezing_another_number_of_ranks_goes_on_as_adam() -> None:
    given = gradients(FREEZE, 4)
    states = [ledger.exchange.state_dict() for ledger in deliver(make(), SHAPES, given[:6])]
    new = [make()().redistribute(states, rank, 2) for rank in range(2)]
    pairs = given[6:].view(-1, 2, 2, NUM).mean(dim=2)
    directions = deliver(make(), SHAPES, pairs, new, 6)[0].directions
    torch.testing.assert_close(
        directions.double(), adam(given.mean(dim=1), FREEZE)[6:], rtol=1e-4, atol=1e-5
    )
