"""Exchanges that leave directions: what all of them keep, refuse, and what 1-bit ones send."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from lab.exchange.muon import Dion, Muon
from lab.exchange.onebit_adam import IntervalSchedule, OneBitAdam, OneBitLamb, ZeroOneAdam
from tests.support.directions import Ledger, Uncompressed, adam, deliver, num_values, of_like_sizes
from tests.unit.exchange.test_muon import SHAPES, Net
from tests.unit.exchange.test_onebit_adam import NUM, SETTLES, gradients
from tests.unit.exchange.test_onebit_adam import SHAPES as ROWS

FREEZE, LAST = 10, 28  # the last step that updates a variance
ONE_BIT = partial(OneBitAdam, block_size=64, freeze_at=FREEZE)
BY_GRADIENT = partial(ONE_BIT, signs_of="gradient")
ZERO_ONE = partial(ZeroOneAdam, block_size=64, updates_per_interval=4, longest_interval=4)
SIGNED: dict[str, tuple[Callable[..., Any], int]] = {
    "1-bit Adam": (ONE_BIT, FREEZE),
    "0/1 Adam": (ZERO_ONE, LAST),
}


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(
    ("make", "last", "due"),
    [
        (ONE_BIT, FREEZE, lambda step: True),
        (BY_GRADIENT, FREEZE, lambda step: True),
        (ZERO_ONE, LAST, IntervalSchedule(4, 4).is_due),
    ],
    ids=["1-bit Adam", "by gradients", "0/1 Adam"],
)
def test_without_signs_it_is_adam_with_a_variance_that_stays(
    make: Callable[[], Any],
    last: int,
    due: Callable[[int], bool],
    size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lab.exchange.signed_rows.RaggedBlocks", Uncompressed)
    given = of_like_sizes(last + 20, size, NUM)
    directions = deliver(make, ROWS, given)[0].directions.double()
    reference = adam(given.mean(dim=1), last, due=due)
    assert (directions - reference).norm() <= 1e-6 * reference.norm()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    "make",
    [
        partial(OneBitAdam, block_size=256, freeze_at=1),
        partial(ZeroOneAdam, block_size=256, updates_per_interval=1, longest_interval=1),
    ],
    ids=SIGNED,
)
def test_two_messages_a_bucket_of_a_24th_of_the_rings_bytes(
    make: Callable[[], Any], size: int
) -> None:
    shapes = {"wide": (512, 128), "narrow": (128, 512), "bias": (512,), "norm": (128,)}
    ledger = deliver(make, shapes, torch.randn(4, size, num_values(shapes)))[0]
    ring = 8 * num_values(shapes) * (size - 1) / size
    assert ledger.payload[0] == pytest.approx(ring, abs=8)
    for payload, messages in zip(ledger.payload[1:], ledger.messages[1:], strict=True):
        assert messages == 2 * (size - 1)  # an all-to-all and an all-gather
        assert ring / payload >= 24


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("make", "steps", "of_all", "of_shard"),
    [(partial(ONE_BIT, block_size=256), FREEZE + 2, 8, 8), (ZERO_ONE, LAST + 2, 12, 4)],
    ids=SIGNED,
)
def test_a_rank_keeps_so_many_bytes_a_value(
    make: Callable[[], Any], steps: int, of_all: int, of_shard: int, size: int
) -> None:
    rows_and_columns = sum(shape[0] + NUM // shape[0] for shape in ROWS.values())
    for ledger in deliver(make, ROWS, gradients(steps, size)):
        state = ledger.exchange.state_dict()
        kept = sum(t.nbytes for tensors in state.values() for t in tensors.values())
        assert kept <= (of_all + of_shard / size) * NUM + 8 * rows_and_columns


@pytest.mark.parametrize(("make", "last"), SIGNED.values(), ids=SIGNED)
def test_rows_that_never_had_a_gradient_do_not_move(make: Callable[[], Any], last: int) -> None:
    given = gradients(last + 30, 3)
    unused = slice(NUM - 5 * 32, NUM)  # the last rows of the table
    given[:, :, unused] = 0
    ledgers = deliver(make, ROWS, given)
    directions = ledgers[0].directions
    assert not directions[:, unused].any() and directions[-1, : unused.start].all()
    (choice,) = ledgers[0].exchange.choices()
    assert choice["frozen_at"] == last
    assert (choice["silent_rows"], choice["late_rows"]) == (5, 0)


@pytest.mark.parametrize(("make", "last"), SIGNED.values(), ids=SIGNED)
def test_a_parameter_without_any_gradient_stays(make: Callable[[], Any], last: int) -> None:
    given = gradients(last + 5, 2)
    given[..., 1200:] = 0
    directions = deliver(make, ROWS, given)[0].directions
    assert directions[-1, :1200].all() and not directions[:, 1200:].any()


def frozen_at(ledgers: list[Ledger]) -> set[int | None]:
    return {ledger.exchange.choices()[0].get("frozen_at") for ledger in ledgers}


SETTLING = partial(OneBitAdam, block_size=64, settle_below=0.5, **SETTLES)
ADAMS: list[tuple[Callable[[], Any], dict[str, tuple[int, ...]], int]] = [
    *((SETTLING, ROWS, stop) for stop in (3, 15, 16, 17, 30)),
    *((ZERO_ONE, ROWS, stop) for stop in (4, 5, 12, 13, LAST, LAST + 1)),
    *((partial(OneBitLamb, block_size=64, freeze_at=9), SHAPES, stop) for stop in (8, 15, 32)),
    *((make, SHAPES, 5) for make in (Muon, Dion)),
]


@pytest.mark.parametrize(("make", "shapes", "stop"), ADAMS)
def test_a_resumed_run_has_the_same_bits(
    make: Callable[[], Any], shapes: dict[str, tuple[int, ...]], stop: int
) -> None:
    net = Net() if shapes is SHAPES else None
    given = gradients(50, 3) if net is None else torch.randn(35, 3, num_values(shapes))
    if net is None:
        given[:9, :, -64:] = 0  # rows that begin late
    whole = deliver(make, shapes, given, weights=net)
    first = deliver(make, shapes, given[:stop], weights=net)
    states = [ledger.exchange.state_dict() for ledger in first]
    resumed = deliver(make, shapes, given[stop:], states, stop, weights=net)
    assert torch.equal(resumed[0].directions, whole[0].directions[stop:])
    assert frozen_at(resumed) == frozen_at(whole)


@pytest.mark.parametrize("make", [Muon, Dion, *(make for make, _ in SIGNED.values())])
def test_a_gradient_that_is_not_finite_reaches_all(make: Callable[[], Any]) -> None:
    for bad in (torch.nan, torch.inf):
        given = torch.randn(2, 3, num_values(SHAPES))
        given[1, 2, 5] = bad
        deliver(make, SHAPES, given, weights=Net())  # compares `finite` with the gradients


@pytest.mark.parametrize("new_size", [1, 2, 4])
@pytest.mark.parametrize(
    ("make", "old_size", "rtol"), [(partial(Muon, dtype="float32"), 4, 1e-4), (Dion, 3, 1e-3)]
)
def test_another_number_of_ranks_goes_on_where_the_old_one_stopped(
    make: Callable[[], Any], old_size: int, new_size: int, rtol: float
) -> None:
    given, net = torch.randn(8, old_size, num_values(SHAPES)), Net()
    first = deliver(make, SHAPES, given[:5], weights=net)
    old, states = [ledger.exchange.state_dict() for ledger in first], list[dict[str, Any]]()
    for rank in range(new_size):
        exchange = make()
        exchange.setup(net)
        states.append(exchange.redistribute(old, rank, new_size))
    mean = given[5:].mean(dim=1, keepdim=True).expand(-1, new_size, -1)
    resumed = deliver(make, SHAPES, mean, states, 5, weights=net)[0].directions
    whole = deliver(make, SHAPES, given, weights=net)[0].directions[5:]
    torch.testing.assert_close(resumed, whole, rtol=rtol, atol=1e-4)
