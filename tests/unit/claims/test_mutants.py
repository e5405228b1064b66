"""Each mutant of the cost model is noticed, by a claim or by held-out cells."""

from __future__ import annotations

import pytest

from lab.claims.claims import Claim
from lab.claims.metrics import delivered_error
from tests.conftest import ROOT
from tests.support import mutants
from tests.support.mutants import INTACT, MUTANTS, Mutant


@pytest.fixture(scope="module")
def intact() -> dict[tuple[Claim, int], str]:
    return mutants.outcomes(INTACT)


def test_without_a_mutant_cells_notice_nothing(intact: dict[tuple[Claim, int], str]) -> None:
    assert mutants.noticed_by(INTACT, intact) == []
    assert not mutants.figures_notice(mutants.figure_errors(INTACT), mutants.figure_errors(INTACT))
    assert not mutants.leaves_bounds(mutants.held_out_scores(INTACT))


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_noticed(mutant: Mutant, intact: dict[tuple[Claim, int], str]) -> None:
    by_cells = mutants.leaves_bounds(mutants.held_out_scores(mutant))
    errors = mutants.figure_errors(INTACT)
    by_figures = mutants.figures_notice(mutants.figure_errors(mutant), errors)
    assert mutants.noticed_by(mutant, intact) or by_figures or by_cells


@pytest.mark.slow
def test_the_documented_table_is_todays() -> None:
    assert "\n".join(mutants.table()) in (ROOT / "docs/results/mutants.md").read_text()


@pytest.mark.parametrize(("strategy", "most"), [("allreduce", 1e-6), ("onebit", 0.2)])
def test_exchanges_deliver_in_the_long_run(strategy: str, most: float) -> None:
    assert delivered_error(strategy) <= most
