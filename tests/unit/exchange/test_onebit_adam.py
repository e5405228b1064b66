"""1-bit Adam against AdamW, and against arithmetic."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lab.exchange.onebit_adam import OneBitAdam
from tests.support.directions import (
    Ledger,
    Uncompressed,
    adam,
    deliver,
    num_values,
    of_like_sizes,
)

SHAPES = {"fc": (24, 50), "bias": (24,), "conv": (6, 5, 3, 3), "table": (20, 32)}
NUM = num_values(SHAPES)
FREEZE = 10


def gradients(steps: int, size: int) -> Tensor:
    """Return gradients with a common part, of sizes that differ by row and column."""
    scale = torch.rand(NUM) + 0.5
    return scale * (torch.randn(steps, size, NUM) + 0.5 * torch.randn(NUM))


def make(**settings: Any) -> partial[OneBitAdam]:
    return partial(OneBitAdam, **{"block_size": 64, "freeze_at": FREEZE, **settings})


@pytest.mark.parametrize("size", [1, 2, 3])
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


@pytest.mark.parametrize("signs_of", ["momentum", "gradient"])
@pytest.mark.parametrize("size", [1, 3])
def test_without_signs_it_is_adam_with_a_frozen_variance(
    size: int, signs_of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lab.exchange.signed_rows.Blocks", Uncompressed)
    given = of_like_sizes(FREEZE + 20, size, NUM)
    directions = deliver(make(signs_of=signs_of), SHAPES, given)[0].directions.double()
    reference = adam(given.mean(dim=1), FREEZE)
    assert (directions - reference).norm() <= 1e-6 * reference.norm()


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


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
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


@pytest.mark.parametrize("size", [2, 4])
def test_two_messages_a_bucket_of_a_24th_of_the_rings_bytes(size: int) -> None:
    shapes = {f"layer{i}.{kind}": shape for i in range(3) for kind, shape in LAYER.items()}
    given = torch.randn(4, size, num_values(shapes))
    ledger = deliver(make(freeze_at=1, block_size=256), shapes, given)[0]
    ring = 8 * num_values(shapes) * (size - 1) / size
    assert ledger.payload[0] == pytest.approx(ring, abs=8)
    for payload, messages in zip(ledger.payload[1:], ledger.messages[1:], strict=True):
        assert messages == 2 * (size - 1)  # an all-to-all and an all-gather
        assert ring / payload >= 24


LAYER = {"wide": (512, 128), "narrow": (128, 512), "bias": (512,), "norm": (128,)}


def test_rows_that_never_had_a_gradient_do_not_move() -> None:
    given = gradients(FREEZE + 40, 3)
    unused = slice(NUM - 5 * 32, NUM)  # the last rows of the table
    given[:, :, unused] = 0
    ledgers = deliver(make(), SHAPES, given)
    directions = ledgers[0].directions
    assert torch.equal(directions[:, unused], torch.zeros_like(directions[:, unused]))
    assert directions[-1, : unused.start].all()
    (choice,) = ledgers[0].exchange.choices()
    assert choice["frozen_at"] == FREEZE
    assert (choice["silent_rows"], choice["late_rows"]) == (5, 0)


def test_a_first_gradient_after_freezing_is_counted_and_changes_nothing() -> None:
    given = gradients(FREEZE + 20, 2)
    given[:, :, NUM - 3 * 32 :] = 0
    given[FREEZE + 5 :, 1, NUM - 40 :] = (
        1e3  # the last row, and a part of the one before; on rank 1
    )
    ledgers = deliver(make(), SHAPES, given)
    assert not ledgers[0].directions[:, NUM - 3 * 32 :].any()
    assert ledgers[0].directions.abs().max() < 20
    assert [ledger.exchange.choices()[0]["late_rows"] for ledger in ledgers] == [0, 2]


def test_a_parameter_without_any_gradient_stays() -> None:
    given = torch.zeros(FREEZE + 3, 2, NUM)
    given[..., :1200] = torch.randn(FREEZE + 3, 2, 1200)
    directions = deliver(make(), SHAPES, given)[0].directions
    assert directions[-1, :1200].all()
    assert not directions[:, 1200:].any()


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
    assert exchange.settling.ratio == pytest.approx(exact, rel=1e-4)


LENGTHS = [1200, 24, 270, 640]


@pytest.mark.parametrize("stop", [3, 14, 15, 16, 17, 18, 30, 45])
def test_a_resumed_run_has_the_same_bits(stop: int) -> None:
    given = gradients(50, 3)
    settings = make(**SETTLES, settle_below=0.5)
    whole = deliver(settings, SHAPES, given)
    states = [ledger.exchange.state_dict() for ledger in deliver(settings, SHAPES, given[:stop])]
    resumed = deliver(settings, SHAPES, given[stop:], states, stop)
    assert torch.equal(resumed[0].directions, whole[0].directions[stop:])
    assert frozen_at(resumed) == frozen_at(whole) == 16


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


def test_it_keeps_8_and_8_over_n_bytes_a_value() -> None:
    for size in (2, 4):
        for ledger in deliver(make(block_size=256), SHAPES, gradients(FREEZE + 2, size)):
            state = ledger.exchange.state_dict()
            kept = sum(t.nbytes for tensors in state.values() for t in tensors.values())
            rows_and_columns = sum(shape[0] + NUM // shape[0] for shape in SHAPES.values())
            assert kept <= (8 + 8 / size) * NUM + 8 * rows_and_columns


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"betas": (0.9, 1.0)}, r"exchange.betas=\[0.9, 1.0\]: must be two numbers"),
        ({"eps": 0}, r"exchange.eps=0: must be a number above 0"),
        ({"block_size": 4}, r"exchange.block_size=4: must be an integer of at least 8"),
        ({"settle_every": 1}, r"exchange.settle_every=1: must be an integer of at least 2"),
        ({"settle_below": 1}, r"exchange.settle_below=1: must be a number above 0"),
        ({"freeze_at": 0}, r"exchange.freeze_at=0: must be an integer of at least 1"),
        ({"signs_of": "sums"}, r"exchange.signs_of=sums: allowed are momentum, gradient"),
        ({"least_steps": 0}, r"exchange.least_steps=0: must be an integer of at least 1"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OneBitAdam(**settings)
