"""Verify a paper: compute everything that its table, page and figures show."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from lab.analysis.records import Cell, commits_of, load_study
from lab.claims.claims import Paper, Reproduction, Verdict, judge
from lab.claims.device import Device, Network, networks
from lab.claims.metrics import Facts, MeasuredFacts, Missing, Point
from lab.claims.predicted import (
    CellSpeedup,
    Crossovers,
    Predicted,
    RateSpeedups,
    SpeedupMap,
    Terms,
    cell_speedups,
    find_crossovers,
    fit_terms,
    profile_of,
    rate_speedups,
    speedup_map,
)
from lab.model.facts import Counts
from lab.settings.config import build, load
from lab.settings.files import located, read_file
from lab.settings.overrides import own_choices
from lab.simulate.hardware import Hardware, draws, parse, places
from lab.simulate.score import ScoredCell, scored_cell


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
        device: what claims about one device were checked against.
        mini_batches: the paper's table of them, and the study's.
    """

    paper: Paper
    verdicts: tuple[Verdict, ...]
    conditions: Conditions | None
    reproduced: Reproduced | None
    terms: Terms | None
    device: Device
    mini_batches: tuple[Network, ...] = ()

    @property
    def any_claim_fails(self) -> bool:
        return any(verdict.outcome == "fails" for verdict in self.verdicts)


def verify(
    name: str,
    runs: Path | None = None,
    benches: Path | None = None,
    reproduce: bool = False,
    config_dir: str | None = None,
) -> Findings:
    """Judge the claims of a paper by predictions and counts, and by what was measured.

    Args:
        name: a file of conf/claims, or the path of one.
        runs: folder of the study that measures the paper.
        benches: folder of results of lab.bench, for claims about one device.
        reproduce: also predict and score all cells of the paper's reproduction, and search
            crossovers. It takes some seconds.
        config_dir: folder of the user's own claims, hardware and profiles.

    Raises:
        ConfigError: there is no such file in conf.
        ValueError: such a file, the study or a result cannot be read, or the paper has no study.
    """
    return _find(_paper(name, config_dir), runs, benches, reproduce)


def _paper(name: str, config_dir: str | None) -> Paper:
    return Paper.parse(located(read_file("claims", name, config_dir), config_dir))


def _find(
    paper: Paper, runs: Path | None, benches: Path | None, reproduce: bool = False
) -> Findings:
    if runs and not (paper.reproduction or paper.study):
        raise ValueError(f"runs={runs}: there is no study of {paper.title}")
    if benches and not benches.is_dir():
        raise ValueError(f"benches={benches}: must be a folder")
    device = Device(paper.networks, paper.benches, benches, _cells(runs) if paper.study else ())
    if paper.profile is None or paper.hardware is None:
        verdicts, table = judge(paper, None, None, device=device), networks(paper.table, device)
        return Findings(paper, verdicts, None, None, None, device, table)
    counts = _counts(paper.model) if paper.model else None
    hardware = _hardware(paper.hardware)
    predicted = Predicted(paper.profile, hardware, counts=counts)
    others = [
        Predicted(paper.profile, each, counts=counts, place=place)
        for each, place in zip(draws(hardware), places(), strict=True)
    ]
    measured = _measured(runs, predicted.profile, counts or predicted.counts()) if runs else None
    reproduced = None
    if reproduce and paper.reproduction:
        reproduced = _reproduce(paper, paper.reproduction, predicted, measured, runs)
    conditions = None
    if measured:
        machines, emulations = tuple(measured.machines()), tuple(measured.emulations())
        conditions = Conditions(machines, emulations, measured.commits())
    verdicts = judge(paper, predicted, measured, others, device)
    terms = fit_terms(paper, hardware)
    return Findings(paper, verdicts, conditions, reproduced, terms, device)


def verify_all(
    names: Iterable[str],
    runs: Path | None = None,
    benches: Path | None = None,
    config_dir: str | None = None,
) -> dict[str, Findings]:
    """Judge several papers.

    Args:
        names: files of conf/claims.
        runs: folder of studies, each in a folder of its name.
        benches, config_dir: see `verify`.

    Raises:
        ConfigError, ValueError: see `verify`.
    """
    found = {}
    for name in names:
        paper = _paper(name, config_dir)
        study = paper.reproduction.study if paper.reproduction else paper.study
        folder = runs / study if runs and study and (runs / study).is_dir() else None
        found[name] = _find(paper, folder, benches)
    return found


def _reproduce(
    paper: Paper,
    grid: Reproduction,
    predicted: Predicted,
    measured: MeasuredFacts | None,
    runs: Path | None,
) -> Reproduced:
    hardware, scored = _hardware(grid.hardware), None
    if runs:
        hardware, scored = _fit(runs, predicted.profile, hardware)
    study = Predicted(predicted.profile, hardware, grid.bytes_scale)
    own_cores = replace(hardware, num_cores=None)
    return Reproduced(
        grid=grid,
        basis=str(study),
        cells=cell_speedups(paper, grid, study, measured),
        scored=scored,
        crossovers=(find_crossovers(grid, predicted), find_crossovers(grid, study)),
        rates=rate_speedups(grid, predicted),
        map=speedup_map(grid, Predicted(predicted.profile, own_cores, grid.bytes_scale)),
    )


# torch is imported in functions: not every paper needs it.


def _counts(model: str) -> Counts:
    from lab.measure.operations import counts_of

    return counts_of(partial(build, load(own_choices([f"model={model}"])).model))


def _fit(runs: Path, profile: str, preset: Hardware) -> tuple[Hardware, tuple[ScoredCell, ...]]:
    from lab.simulate.fit import fitted_groups

    (group,) = fitted_groups(runs, profile_of(profile), preset)
    name = f"{group.hardware.name} (fitted to cells of 1 and 2 ranks)"
    return replace(group.hardware, name=name), tuple(
        scored_cell(group, cell) for cell in group.observations
    )


def _cells(runs: Path | None) -> Sequence[Cell]:
    return load_study(runs).cells if runs else []


def _measured(runs: Path, profile: str, counts: Counts) -> MeasuredFacts:
    cells = _cells(runs)
    kinds = sorted({cell.circumstances for cell in cells})
    if len(kinds) > 1:
        raise ValueError(f"runs={runs}: must be of one machine and its links: {'; '.join(kinds)}")
    return Measured(cells, profile, counts)


def _hardware(name: str) -> Hardware:
    return parse(read_file("hardware", name))


class Measured:
    """Facts from finished throughput runs with strong scaling: the median of their repeats.

    Args:
        cells: all cells of the study.
        profile: the paper's.
        counts: of the paper's network, because cells replay a scaled one.
    """

    def __init__(self, cells: Sequence[Cell], profile: str, counts: Counts) -> None:
        self._all_cells, self._profile, self._counts = cells, profile, counts
        self._cells: dict[Point, list[Cell]] = {}
        for cell in cells:
            if (cell.status, cell.measure, cell.scaling) == ("done", "throughput", "strong"):
                replayed = cell.settings.get("profile", profile)
                other = None if replayed == profile else replayed
                at = Point(cell.strategy, cell.world_size, cell.batch_size, other)
                self._cells.setdefault(at, []).append(cell)

    def repeats(self) -> Sequence[Facts]:
        """Return the facts of each single repeat."""
        by_repeat: dict[int, list[Cell]] = {}
        for cell in self._all_cells:
            by_repeat.setdefault(cell.repeat, []).append(cell)
        return [
            Measured(by_repeat[repeat], self._profile, self._counts) for repeat in sorted(by_repeat)
        ]

    def step_s(self, at: Point) -> float:
        """Return the seconds of a step: the median over steps of the slowest rank."""
        return self._median(at, lambda cell: cell.step_s)

    def payload_bytes(self, at: Point) -> float:
        """Return the bytes that the busiest rank handed to the network in a step."""
        return self._median(at, lambda cell: max(cell.payload_bytes_per_step, default=math.nan))

    def counts(self) -> Counts:
        """Return the counts of the paper's network."""
        return self._counts

    def emulations(self) -> list[str]:
        """List the emulations of the runs, sorted; empty if there were none."""
        cells = (cell for each in self._cells.values() for cell in each)
        return sorted({one.detail for cell in cells for one in cell.emulation})

    def machines(self) -> list[str]:
        """List the machines of the runs, sorted."""
        known = [c.environment for cells in self._cells.values() for c in cells if c.environment]
        return sorted({f"{e['cpu']}, {e['num_cores']} cores, torch {e['torch']}" for e in known})

    def commits(self) -> tuple[str, ...]:
        """List the lab's commits that measured the runs; empty if one is not known."""
        return commits_of(self._all_cells)

    def _median(self, at: Point, value: Callable[[Cell], float]) -> float:
        values = [value(cell) for cell in self._cells.get(at, ())]
        finite = [one for one in values if math.isfinite(one)]
        if not finite:
            raise Missing
        return statistics.median(finite)
