"""Verify a paper: compute everything that its table, page and figures show."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from lab.claims.claims import Paper, Reproduction
from lab.claims.crossovers import Crossovers, find_crossovers
from lab.claims.metrics import MeasuredFacts
from lab.claims.predicted import Predicted, profile_of
from lab.claims.speedups import (
    CellSpeedup,
    RateSpeedups,
    SpeedupMap,
    cell_speedups,
    rate_speedups,
    speedup_map,
)
from lab.claims.terms import Terms, fit_terms
from lab.claims.verdicts import Verdict, judge
from lab.model.facts import Counts
from lab.settings.config import build, load
from lab.settings.files import located, read_file
from lab.simulate.fit import DRAWS
from lab.simulate.hardware import Hardware
from lab.simulate.presets import draws, parse, places
from lab.simulate.score import ScoredCell, scored_cells


@dataclass(frozen=True)
class Conditions:
    """The machines, the emulations and the lab's commits of a study; see MeasuredFacts."""

    machines: tuple[str, ...]
    emulations: tuple[str, ...]
    commits: tuple[str, ...]


@dataclass(frozen=True)
class Reproduced:
    """The cells of a paper's reproduction, and predictions around them.

    Attributes:
        basis: the profile and the hardware that cells are predicted from: the study's, fitted to
            its cells of one and two ranks if there are runs.
        cells: speedups of all cells of the grid.
        scored: every measured cell; None without runs.
        crossovers: on the paper's hardware, and on the study's.
        rates: on the paper's hardware.
        map: on the study's hardware, every rank with cores of its own.
    """

    grid: Reproduction
    basis: str
    cells: tuple[CellSpeedup, ...]
    scored: tuple[ScoredCell, ...] | None
    crossovers: tuple[Crossovers, ...]
    rates: RateSpeedups
    map: SpeedupMap


@dataclass(frozen=True)
class Findings:
    """All findings about a paper; the table, the page and its figures are made from them.

    Attributes:
        conditions: None if there are no measurements.
        reproduced: None if not requested, or if the paper has no reproduction.
        terms: None if the paper names none to fit.
    """

    paper: Paper
    verdicts: tuple[Verdict, ...]
    conditions: Conditions | None
    reproduced: Reproduced | None
    terms: Terms | None

    @property
    def any_claim_fails(self) -> bool:
        return any(verdict.outcome == "fails" for verdict in self.verdicts)


def verify(
    name: str, runs: Path | None = None, reproduce: bool = False, config_dir: str | None = None
) -> Findings:
    """Judge the claims of a paper by predictions, and by measurements where there are any.

    Args:
        name: a file of conf/claims, or the path of one.
        runs: folder of the study that measures the paper.
        reproduce: also predict and score all cells of the paper's reproduction, and search
            crossovers. It takes some seconds.
        config_dir: folder of the user's own claims, hardware and profiles.

    Raises:
        ConfigError: there is no such file in conf.
        ValueError: such a file or the study cannot be read, or the paper has no study.
    """
    paper = Paper.parse(located(read_file("claims", name, config_dir), config_dir))
    counts = _counts(paper.model) if paper.model else None
    hardware = _hardware(paper.hardware)
    predicted = Predicted(paper.profile, hardware, counts=counts)
    others = [
        Predicted(paper.profile, each, counts=counts, place=place)
        for each, place in zip(draws(hardware, DRAWS), places(DRAWS), strict=True)
    ]
    measured = _measured(runs, paper, counts or predicted.counts()) if runs else None
    reproduced = None
    if reproduce and paper.reproduction:
        reproduced = _reproduce(paper, paper.reproduction, predicted, measured, runs)
    conditions = None
    if measured:
        machines, emulations = tuple(measured.machines()), tuple(measured.emulations())
        conditions = Conditions(machines, emulations, measured.commits())
    verdicts = judge(paper, predicted, measured, others)
    return Findings(paper, verdicts, conditions, reproduced, fit_terms(paper, hardware))


def _reproduce(
    paper: Paper,
    grid: Reproduction,
    predicted: Predicted,
    measured: MeasuredFacts | None,
    runs: Path | None,
) -> Reproduced:
    hardware, scored = _hardware(grid.hardware), None
    if runs:
        hardware, scored = _fit(runs, paper, hardware)
    study = Predicted(paper.profile, hardware, grid.bytes_scale)
    own_cores = replace(hardware, num_cores=None)
    return Reproduced(
        grid=grid,
        basis=str(study),
        cells=cell_speedups(paper, grid, study, measured),
        scored=scored,
        crossovers=(find_crossovers(grid, predicted), find_crossovers(grid, study)),
        rates=rate_speedups(grid, predicted),
        map=speedup_map(grid, Predicted(paper.profile, own_cores, grid.bytes_scale)),
    )


# Imported in functions: pandas and torch take seconds, and not every paper needs them.


def _counts(model: str) -> Counts:
    from lab.model.counts import counts_of

    return counts_of(partial(build, load([f"model={model}"]).model))


def _fit(runs: Path, paper: Paper, preset: Hardware) -> tuple[Hardware, tuple[ScoredCell, ...]]:
    from lab.simulate.observe import fitted_groups

    (group,) = fitted_groups(runs, profile_of(paper.profile), preset)
    name = f"{group.hardware.name} (fitted to cells of 1 and 2 ranks)"
    return replace(group.hardware, name=name), scored_cells(group)


def _measured(runs: Path, paper: Paper, counts: Counts) -> MeasuredFacts:
    from lab.analysis.records import load_study
    from lab.claims.measured import Measured

    if not paper.reproduction:
        raise ValueError(f"runs={runs}: there is no study of {paper.title}")
    cells = load_study(runs).cells
    kinds = sorted({cell.circumstances for cell in cells})
    if len(kinds) > 1:
        raise ValueError(f"runs={runs}: must be of one machine and its links: {'; '.join(kinds)}")
    return Measured(cells, paper.profile, counts)


def _hardware(name: str) -> Hardware:
    return parse(read_file("hardware", name))
