"""A part of the zoo that has every model, loop and exchange: `make zoo` has the whole product."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.slow import some_of
from tests.zoo.drive import (
    BAD,
    EXCHANGES,
    HARD,
    PROCESSES,
    REFUSED,
    RIGHT,
    SYNCS,
    Case,
    Driver,
    cases_of,
)
from tests.zoo.loops import LOOPS
from tests.zoo.models import MODELS

LIVELY = ("allreduce", "onebit", "int4", "schedule")  # exact, two lossy ones and both
FREE = [name for name, loop in LOOPS.items() if not loop.of_trainer]


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    made = Driver()
    yield made
    made.close()


def faults(driver: Driver, cases: list[Case]) -> list[str]:
    """Run cases, of which one at least must apply; return what is wrong."""
    found = {case: driver.outcome(case) for case in cases}
    assert any(outcome.kind in (RIGHT, REFUSED, *BAD) for outcome in found.values()), found
    return [f"{case}: {o.kind}: {o.said}" for case, o in found.items() if o.kind in BAD]


def turned(names: tuple[str, ...] | list[str], by: str) -> str:
    """Return one of `names`, another for another `by`."""
    return names[sum(by.encode()) % len(names)]


@pytest.mark.parametrize(
    "model", some_of([name for name, model in MODELS.items() if not model.slow], every=7)
)
def test_every_model_is_right_or_refused(model: str, driver: Driver) -> None:
    cases = [Case(model, "plain", turned(LIVELY, model), "grad_sync")]
    cases += [Case(model, "trained", turned([*SYNCS][:-1], model), "sync")]
    if not sum(model.encode()) % 10:
        cases += [Case(model, "plain", turned(EXCHANGES, model), turned(PROCESSES, model))]
    assert faults(driver, cases) == []


@pytest.mark.parametrize("loop", some_of(FREE, every=5))
def test_every_loop_is_right_or_refused(loop: str, driver: Driver) -> None:
    cases = [Case(turned(HARD[:6], loop), loop, turned(EXCHANGES, loop), "grad_sync")]
    entrance = "attach" if LOOPS[loop].ddp else "grad_sync"
    cases += [Case("mlp", loop, turned(LIVELY, loop), entrance)]
    assert faults(driver, cases) == []


@pytest.mark.parametrize("exchange", some_of(EXCHANGES, every=4))
def test_every_exchange_takes_hard_models(exchange: str, driver: Driver) -> None:
    cases = [Case(model, "plain", exchange, "grad_sync") for model in HARD[:3]]
    assert faults(driver, cases) == []


@pytest.mark.parametrize("strategy", some_of(SYNCS, every=3))
def test_every_sync_of_the_trainer_takes_hard_models(strategy: str, driver: Driver) -> None:
    loops = [name for name, loop in LOOPS.items() if loop.of_trainer]
    assert faults(driver, list(cases_of(HARD[:2], loops, [strategy], ["sync"]))) == []


def test_models_that_cannot_be_right_are_refused_in_a_line(driver: Driver) -> None:
    never = [name for name, model in MODELS.items() if "always" in model.refused]
    assert len(never) > 5
    found = {name: driver.outcome(Case(name, "plain", "onebit", "grad_sync")) for name in never}
    assert {name: o for name, o in found.items() if o.kind != REFUSED or "\n" in o.said} == {}
