"""Verify a paper: compute everything that its table, page and figures show."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from lab.analysis.records import Cell, load_study
from lab.claims.claims import Paper, Reproduction
from lab.claims.device import Device, Network, kind_of, networks
from lab.claims.metrics import Conditions, Measured
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
from lab.claims.verdicts import CHANGES, Verdict, judge
from lab.model.work import Counts
from lab.settings.config import build, load
from lab.settings.files import located, read_file
from lab.settings.overrides import own_choices
from lab.simulate.fit import fitted_groups
from lab.simulate.hardware import draws, parse, places
from lab.simulate.score import ScoredCell, scored_cell


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


def verify_all(
    names: Iterable[str],
    runs: Path | None = None,
    benches: Path | None = None,
    config_dir: str | None = None,
) -> dict[str, Findings]:
    """Judge several papers: files of conf/claims. The rest is as in `verify`.

    Args:
        runs: folder of studies, each in a folder of its name.
    """
    found = {}
    for name in names:
        paper = _paper(name, config_dir)
        study = paper.reproduction.study if paper.reproduction else paper.study
        folder = runs / study if runs and study and (runs / study).is_dir() else None
        found[name] = _find(paper, folder, benches)
    return found


def _paper(name: str, config_dir: str | None) -> Paper:
    return Paper.parse(located(read_file("claims", name, config_dir), config_dir))


def _find(
    paper: Paper, runs: Path | None, benches: Path | None, reproduce: bool = False
) -> Findings:
    if runs and not (paper.reproduction or paper.study):
        raise ValueError(f"runs={runs}: there is no study of {paper.title}")
    if benches and not benches.is_dir():
        raise ValueError(f"benches={benches}: must be a folder")
    cells = load_study(runs).cells if runs else []
    of_study = cells if paper.study else ()
    figures = paper.figures or paper.table
    device = Device(paper.networks, paper.benches, benches, of_study, figures)
    if paper.profile is None or paper.hardware is None:
        verdicts, table = judge(paper, None, None, device=device), networks(paper.table, device)
        return Findings(paper, verdicts, None, None, None, device, table)
    counts = counts_of_model(paper.model) if paper.model else None
    hardware = parse(read_file("hardware", paper.hardware))
    on = partial(Predicted, paper.profile, network=counts)
    predicted = on(hardware)
    drawn = enumerate(zip(draws(hardware), places(), strict=True))
    others = [on(each, place=place, number=number) for number, (each, place) in drawn]
    measured = None
    if runs:
        kinds = sorted({cell.circumstances for cell in cells})
        if len(kinds) > 1:
            one = "must be of one machine and its links"
            raise ValueError(f"runs={runs}: {one}: {'; '.join(kinds)}")
        measured = Measured(cells, predicted.profile, counts or predicted.counts())
    reproduced = None
    if reproduce and paper.reproduction:
        reproduced = _reproduce(paper, paper.reproduction, predicted, measured, runs)
    conditions = measured.conditions() if measured else None
    changed = [on(hardware, change=change) for change in CHANGES]
    machine = _machine(conditions, cells)
    verdicts = judge(paper, predicted, measured, others, device, changed, machine)
    terms = fit_terms(paper, hardware)
    return Findings(paper, verdicts, conditions, reproduced, terms, device)


def _machine(conditions: Conditions | None, cells: Sequence[Cell]) -> str | None:
    """Return what a study ran on, as in Verdict."""
    if conditions and conditions.emulations:
        return "emulated"
    return kind_of([cell.environment for cell in cells if cell.environment])


def _reproduce(
    paper: Paper,
    grid: Reproduction,
    predicted: Predicted,
    measured: Measured | None,
    runs: Path | None,
) -> Reproduced:
    hardware, scored = parse(read_file("hardware", grid.hardware)), None
    if runs:
        (group,) = fitted_groups(runs, profile_of(predicted.profile), hardware)
        scored = tuple(scored_cell(group, cell) for cell in group.observations)
        name = f"{group.hardware.name} (fitted to cells on 1 and 2 ranks)"
        hardware = replace(group.hardware, name=name)
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


def counts_of_model(model: str) -> Counts:
    """Count the layers and parameters of a file of conf/model."""
    from lab.measure.operations import counts_of  # with torch, which not every paper needs

    return counts_of(partial(build, load(own_choices([f"model={model}"])).model))
