"""A part of the zoo that has every model, loop and exchange: `make zoo` has the whole product."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.slow import some_of
from tests.zoo import __main__ as command
from tests.zoo.drive import (
    BAD,
    EXCHANGES,
    HARD,
    PROCESSES,
    REFUSED,
    RIGHT,
    SKIPPED,
    SYNCS,
    Case,
    Driver,
    Outcome,
    cases_of,
    model_of,
)
from tests.zoo.loops import LOOPS, STEPS, gradients
from tests.zoo.models import MODELS, loss_of
from tests.zoo.reference import Alone, Meeting, truth

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


@pytest.mark.parametrize("name", ["experts", "images", "spectral"])
def test_the_reference_is_one_model_that_has_all_batches(name: str) -> None:
    model, size = model_of(name), 3
    ranks = [Alone(model, rank, Meeting(1), wide=False) for rank in range(size)]
    net = ranks[0].make()
    optimizer = ranks[0].sgd(net.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        for run in ranks:
            (loss_of(net(*run.batch(step))) / size).backward()
        optimizer.step()
    right = truth(model, LOOPS["plain"], size).rounded[0]
    reached = {n for n, g in gradients(net).items() if g is not None}
    assert reached == {n for n, g in right.delivered[0][-1].items() if g is not None}
    for key, weight in net.named_parameters():
        torch.testing.assert_close(right.weights[0][key], weight.detach(), atol=1e-6, rtol=1e-5)


def test_a_loop_that_diverges_in_one_process_too_is_no_fault(driver: Driver) -> None:
    # The squares of float16 gradients, of which torch.optim.LBFGS needs the sum, become zero.
    found = driver.outcome(Case("float16", "lbfgs", "tree", "grad_sync"))
    assert found == Outcome(SKIPPED, "in one process, weights become infinite or NaN too")


def test_the_command_prints_a_table_and_returns_whether_there_is_a_fault(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    judged = [
        (Case("mlp", "plain", "onebit", "grad_sync"), Outcome(RIGHT)),
        (Case("mlp", "plain", "topk", "grad_sync"), Outcome("wrong", "why")),
    ]
    assert "| all  | 2 | 1 | 0 | 1 | 0 | 0 | 0 |" in command.table(judged)
    assert command.main(["model=nobody"]) == 2
    assert "model=nobody: allowed:" in capfd.readouterr().err
