"""Verify a paper: judge its claims, and compute everything that its table, page and figures show.

Claims are judged by values, and what each is worth follows from what its value depends on. A claim
that holds is evidence only if it could have failed: some change of links, compute or bytes between
half and twice, or of what was counted or measured, changes its verdict. One that fails is evidence
in any case: leaving out what no such change explains would flatter the model.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from lab.analysis.records import load_study
from lab.claims.claims import OUTCOMES, Claim, Paper, Reproduction
from lab.claims.device import OF_PRINT, DevicePaper, PaperNetwork, kind_of, networks
from lab.claims.metrics import ClaimPoint, Conditions, Facts, MeasuredFacts, MeasuredRuns
from lab.claims.predicted import (
    CellSpeedup,
    Perturbation,
    Predicted,
    cell_speedups,
    hardware_of,
    preset_of,
    profile_of,
)
from lab.measure.statistics import UNKNOWN, Interval, of_level
from lab.model.work import Counts
from lab.settings.config import build, load
from lab.settings.errors import as_config_error
from lab.settings.files import located, read_file
from lab.settings.overrides import own_choices
from lab.settings.streams import progress
from lab.simulate.fit import fitted_groups
from lab.simulate.hardware import places, uncertainty_samples
from lab.simulate.score import ScoredCell, scored_cell
from lab.simulate.terms import drawn

# What a claim is worth, in the order of a page.
KINDS = {
    "counted": "These claims are about properties of a network or about the number of bytes sent. "
    "Their values are counted, not timed, so they are the same on any machine.",
    "predicted": "The cost model predicts the values in these claims. Each claim that agrees would "
    "fail if the link speed, the compute time or the number of bytes were multiplied by some "
    "factor between 0.5 and 2.",
    "measured": "These claims are about a single device. Only a measurement on the same kind of "
    "device as in the source (a CPU or a GPU) can show whether they hold.",
    "arithmetic": "We do not count these claims as evidence, for the reasons in parentheses. "
    '"Range too wide" means that a claim would still hold even if the values that it depends on '
    "were halved or doubled.",
    "input": "We do not count these claims as evidence, because their values are inputs to the "
    "cost model or come directly from the profile.",
    "own": "We do not count these claims as evidence about the source, because they are our own "
    "statements, not the source's.",
}
# Those that are no evidence, after a number: one, and several.
OTHERS = {
    "arithmetic": ("arithmetic check", "arithmetic checks"),
    "input": ("model input", "model inputs"),
    "own": ("of our own statements", "of our own statements"),
}
EVIDENCE = ("counted", "predicted", "measured")  # kinds that say something about the source
BUS = "bus_gb_per_s"  # a quantity of one collective
# What decides a verdict, in the order of a table.
BASES = {
    "counted": "counted exactly (operations or bytes, not times)",
    "predicted": "predicted by the cost model (training)",
    "collectives": "predicted by the cost model (single collectives)",
    "emulated": "measured on an emulated cluster",
    "measured": "measured on the same kind of device as in the source",
    "elsewhere": "not tested: measured only on another kind of device",
    "nothing": "not tested: we have no measurement",
}
UNTESTED = ("elsewhere", "nothing")
SURE = "range too wide"
FACTORS = (0.5, 2.0, 0.71, 1.41)
CHANGES = tuple(
    Perturbation(**{what: factor}) for factor in FACTORS for what in ("links", "compute", "bytes")
)


@dataclass(frozen=True)
class ClaimVerdict:
    """A claim, and the values of its quantity.

    Attributes:
        predicted: or counted; None if unknown.
        predicted_ends: lowest and highest, over draws of what the hardware leaves open.
        measured: over repeats, with an interval where these suffice; all NaN if unknown.
        num_repeats: how many repeats have a value.
        machine: what it was measured on: "cpu", "gpu" or "emulated".
        is_elsewhere: the source measured on another kind of device, so `measured` decides nothing.
        kind: a key of KINDS. why: for one that is arithmetic.
        is_counted: no clock is read for its value.
    """

    claim: Claim
    predicted: float | None
    predicted_ends: tuple[float, float] | None = None
    measured: Interval = UNKNOWN
    num_repeats: int = 0
    machine: str | None = None
    is_elsewhere: bool = False
    kind: str = "predicted"
    why: str = ""
    is_counted: bool = False

    @property
    def basis(self) -> str:
        """Return what decides: a key of BASES."""
        if self.is_counted:
            return "counted"
        if not math.isnan(self.measured.mid) and not self.is_elsewhere:
            return "emulated" if self.machine == "emulated" else "measured"
        if self.predicted is not None:
            return "predicted"
        return "nothing" if math.isnan(self.measured.mid) else "elsewhere"

    @property
    def value(self) -> Interval:
        """Return the value that decides; all NaN if none does."""
        if not math.isnan(self.measured.mid) and not self.is_elsewhere:
            return self.measured
        return _exact(self.predicted)

    @property
    def outcome(self) -> str:
        """Return one of OUTCOMES."""
        return self.claim.check.outcome(self.value)

    @property
    def miss(self) -> float | None:
        """Return the relative error against the published figure, or else the bound exceeded.

        Returns:
            None: the value is unknown, or there is nothing to divide by.
        """
        least, most = self.claim.check.allowed
        bound = least if self.value.mid < least else most
        against = self.claim.published or bound
        if math.isnan(self.value.mid) or not against or math.isinf(against):
            return None
        return self.value.mid / against - 1

    @property
    def words(self) -> str:
        """Say what was done, and how it came out."""
        if self.basis == "elsewhere":
            return "wrong kind of device: not testable here"
        if self.outcome == "unknown":
            return "not testable here: not measured"
        done = BASES[self.basis] if self.basis == "emulated" else self.basis
        done = self.kind if self.kind in ("arithmetic", "input") else done
        if self.outcome == "holds":
            return f"{done}: agrees"
        if self.outcome == "within noise":
            return f"{done}: undecided"
        share = "" if self.miss is None else f" by {100 * abs(self.miss):.0f} %"
        return f"model misses{share}" if done == "predicted" else f"{done}: differs{share}"


def judge(
    paper: Paper,
    predicted: Facts | None,
    measured: MeasuredFacts | None,
    others: Sequence[Facts] = (),
    device: DevicePaper | None = None,
    changed: Sequence[Facts] = (),
    machine: str | None = None,
) -> tuple[ClaimVerdict, ...]:
    """Compute each claim's values from the facts, and its kind.

    Args:
        predicted: None: all claims are about one device.
        others: predicted as well, by hardware drawn from what its file leaves open.
        device: for claims about one device; None: nothing about one is known.
        changed: predicted with each of CHANGES; without them no prediction is found unable to fail.
        machine: what `measured` ran on, as in Verdict.
    """
    verdicts: list[ClaimVerdict] = []
    kinds = _Kinds(paper.claims, predicted, changed)
    for claim in paper.claims:
        if claim.of_device:
            verdict = _of_device(claim, device or DevicePaper(), paper.device)
        else:
            verdict = _of_scaling(claim, [predicted, *others] if predicted else [], measured)
            verdict = replace(verdict, machine=machine, is_elsewhere=_differ(machine, paper.device))
        cells = _cells(claim, predicted)
        counted = claim.is_counted if claim.of_device else not cells
        kind, why = kinds.of(verdict, cells)
        verdicts.append(replace(verdict, kind=kind, why=why, is_counted=counted))
    return tuple(verdicts)


def tally(verdicts: Iterable[ClaimVerdict]) -> dict[str, dict[str, int]]:
    """Count outcomes of claims that are evidence, by what decides; single collectives apart."""
    counts = {basis: Counter[str]() for basis in BASES}
    for each in verdicts:
        if each.kind in EVIDENCE:
            is_collective = each.basis == "predicted" and each.claim.quantity == BUS
            counts["collectives" if is_collective else each.basis][each.outcome] += 1
    return {
        basis: {outcome: found[outcome] for outcome in OUTCOMES} for basis, found in counts.items()
    }


def _differ(machine: str | None, device: str | None) -> bool:
    return None not in (machine, device) and machine not in (device, "emulated")


def _of_scaling(
    claim: Claim, predicted: Sequence[Facts], measured: MeasuredFacts | None
) -> ClaimVerdict:
    """Judge by facts that were predicted, the first by the hardware as its file says."""
    values = [claim.value(each) for each in predicted]
    known = [value for value in values if value is not None]
    ends = (min(known), max(known)) if known else None
    return ClaimVerdict(claim, values[0] if values else None, ends, *_measured(claim, measured))


def _of_device(claim: Claim, device: DevicePaper, source: str | None) -> ClaimVerdict:
    value = claim.found(device)
    if claim.is_counted:
        return ClaimVerdict(claim, value.mid if value else None)
    machine = device.measured_on(claim.arguments.get("result"))
    measured = value or UNKNOWN, 1 if value else 0, machine, _differ(machine, source)
    return ClaimVerdict(claim, None, None, *measured)


def _measured(claim: Claim, measured: MeasuredFacts | None) -> tuple[Interval, int]:
    """Return the value over repeats; of cells with different repeats, their medians' alone."""
    if not measured:
        return UNKNOWN, 0
    values = [claim.value(repeat) for repeat in measured.repeats()]
    known = [value for value in values if value is not None]
    if known and min(known) > 0:
        return of_level(known), len(known)
    return _exact(claim.value(measured)), len(known)


def _exact(value: float | None) -> Interval:
    return UNKNOWN if value is None else Interval(math.nan, value, math.nan)


class _Reading:
    """Facts that note of which cells they told the time."""

    def __init__(self, facts: Facts) -> None:
        self._facts, self.cells = facts, set[ClaimPoint]()

    def step_s(self, at: ClaimPoint) -> float:
        self.cells.add(at)
        return self._facts.step_s(at)

    def all_reduce_s(self, at: ClaimPoint) -> float:
        self.cells.add(at)
        return self._facts.all_reduce_s(at)

    def payload_bytes(self, at: ClaimPoint) -> float:
        return self._facts.payload_bytes(at)

    def counts(self) -> Counts:
        return self._facts.counts()


def _cells(claim: Claim, facts: Facts | None) -> set[ClaimPoint]:
    """Return the cells whose times a claim's value depends on."""
    if facts is None or claim.of_device:
        return set()
    reading = _Reading(facts)
    claim.value(reading)
    return reading.cells


class _Kinds:
    """The kinds of a paper's claims, in their order."""

    def __init__(
        self, claims: Sequence[Claim], predicted: Facts | None, changed: Sequence[Facts]
    ) -> None:
        self._changed = changed
        given = (claim for claim in claims if claim.role == "input")
        self._inputs = {cell for claim in given for cell in _cells(claim, predicted)}
        self._told: dict[object, str] = {}  # what earlier claims said

    def of(self, verdict: ClaimVerdict, cells: set[ClaimPoint]) -> tuple[str, str]:
        """Return a key of KINDS, and for arithmetic the reason; `cells` as of `_cells`."""
        claim = verdict.claim
        if claim.role != "statement":
            return claim.role, ""
        if claim.quantity in OF_PRINT:
            return "arithmetic", "uses only the source's own figures"
        if claim.check.about is not None and claim.published is None:
            return "arithmetic", "the source prints no such figure"
        if claim.of_device:
            return _checked("counted" if claim.is_counted else "measured", verdict)
        return self._of_scaling(verdict, cells)

    def _of_scaling(self, verdict: ClaimVerdict, cells: set[ClaimPoint]) -> tuple[str, str]:
        claim = verdict.claim
        if not cells:
            return _checked("counted", verdict)
        # All but the cells whose time is compute alone, as their profile says.
        apart = {c for c in cells if c.strategy != "none" or c.num_bytes is not None}
        if not apart:
            return "input", ""
        if apart <= self._inputs:
            return "arithmetic", "follows from model inputs"
        if not self._changed or verdict.predicted is None:
            return "predicted", ""
        values = [claim.value(facts) for facts in self._changed]
        if all(claim.check.outcome(_exact(v)) == "holds" for v in (verdict.predicted, *values)):
            return "arithmetic", SURE
        return self._first_to_say(claim, apart, [verdict.predicted, *values])

    def _first_to_say(
        self, claim: Claim, cells: set[ClaimPoint], values: Sequence[float | None]
    ) -> tuple[str, str]:
        """Find an earlier claim with the same values and limits, or on the same cells.

        Another published figure of the same cells, as of another machine, says something new.
        """
        texts = tuple("" if value is None else f"{value:.4g}" for value in values)
        keys: list[object] = [(claim.quantity, claim.check, texts)]
        keys += [frozenset(cells)] if claim.published is None else []
        for key in keys:
            if key in self._told:
                return "arithmetic", f"says the same as “{self._told[key]}”"
        self._told |= dict.fromkeys((keys[0], frozenset(cells)), claim.says)
        return "predicted", ""


def _checked(kind: str, verdict: ClaimVerdict) -> tuple[str, str]:
    """Return the kind of a count or a measurement, or arithmetic if one off by two holds too."""
    found = [verdict.value, *(verdict.value.scaled(factor) for factor in FACTORS)]
    holds = all(verdict.claim.check.outcome(one) == "holds" for one in found)
    return ("arithmetic", SURE) if holds else (kind, "")


@dataclass(frozen=True)
class Reproduced:
    """The cells of a paper's reproduction, and predictions around them.

    Attributes:
        paper: predicts by the paper's hardware.
        study: predicts by the study's, fitted to its cells of one and two ranks if there are runs.
        cells: speedups of all cells of the grid, predicted by the study's hardware.
        scored: every measured cell; None without runs.
    """

    grid: Reproduction
    paper: Predicted
    study: Predicted
    cells: tuple[CellSpeedup, ...]
    scored: tuple[ScoredCell, ...] | None


@dataclass(frozen=True)
class Findings:
    """All findings about a paper; the table, the page and its figures are made from them.

    Attributes:
        conditions: None if there are no measurements.
        reproduced: None if not requested, or if the paper has no reproduction.
        device: what claims about one device were checked against.
        mini_batches: the paper's table of them, and the study's.
    """

    paper: Paper
    verdicts: tuple[ClaimVerdict, ...]
    conditions: Conditions | None
    reproduced: Reproduced | None
    device: DevicePaper
    mini_batches: tuple[PaperNetwork, ...] = ()


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
        reproduce: also predict and score all cells of the paper's reproduction.
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
    if runs and not runs.is_dir():
        raise ValueError(f"runs={runs}: must be a folder of studies")
    found = {}
    for name in progress([*names], "source"):
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
        raise ValueError(f"runs={runs}: there is no study for {paper.title}")
    if benches and not benches.is_dir():
        raise ValueError(f"benches={benches}: must be a folder")
    with as_config_error("runs="):
        cells = load_study(runs).cells if runs else []
    of_study = cells if paper.study else ()
    figures = paper.figures or paper.table
    device = DevicePaper(paper.networks, paper.benches, benches, of_study, figures)
    if paper.profile is None or paper.hardware is None:
        verdicts, table = judge(paper, None, None, device=device), networks(paper.table, device)
        return Findings(paper, verdicts, None, None, device, table)
    counts = counts_of_model(paper.model) if paper.model else None
    hardware = hardware_of(paper.hardware, paper.origin)
    on = partial(Predicted, paper.profile, network=counts, origin=paper.origin)
    predicted = on(hardware)
    open_ = enumerate(zip(drawn(uncertainty_samples(hardware)), places(), strict=True))
    others = [on(each, place=place, number=number) for number, (each, place) in open_]
    measured = None
    if runs:
        kinds = sorted({cell.circumstances for cell in cells})
        if len(kinds) > 1:
            one = "all cells must be from one machine with the same links"
            raise ValueError(f"runs={runs}: {one}: {'; '.join(kinds)}")
        measured = MeasuredRuns(cells, predicted.profile, counts or predicted.counts())
    reproduced = None
    if reproduce and paper.reproduction:
        reproduced = _reproduce(paper, paper.reproduction, predicted, measured, runs)
    conditions = measured.conditions() if measured else None
    changed = [on(hardware, change=change) for change in CHANGES]
    is_emulated = conditions is not None and bool(conditions.emulations)
    ran_on = [cell.environment for cell in cells if cell.environment]
    machine = "emulated" if is_emulated else kind_of(ran_on)
    verdicts = judge(paper, predicted, measured, others, device, changed, machine)
    return Findings(paper, verdicts, conditions, reproduced, device)


def _reproduce(
    paper: Paper,
    grid: Reproduction,
    predicted: Predicted,
    measured: MeasuredRuns | None,
    runs: Path | None,
) -> Reproduced:
    hardware, scored = preset_of(grid.hardware), None
    if runs:
        (group,) = fitted_groups(runs, profile_of(predicted.profile), hardware)
        scored = tuple(scored_cell(group, cell) for cell in group.observations)
        name = f"{group.hardware.name} (fitted to cells on 1 and 2 ranks)"
        hardware = replace(group.hardware, name=name)
    study = Predicted(predicted.profile, hardware, grid.bytes_scale)
    cells = cell_speedups(paper, grid, study, measured)
    return Reproduced(grid, predicted, study, cells, scored)


def counts_of_model(model: str) -> Counts:
    """Count the layers and parameters of a file of conf/model."""
    from lab.measure.operations import counts_of  # with torch, which not every paper needs

    return counts_of(partial(build, load(own_choices([f"model={model}"])).model))
