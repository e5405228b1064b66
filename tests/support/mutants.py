"""Mutants: the cost model with one thing broken, and what notices.

    python -m tests.support.mutants > docs/results/mutants.md

A claim notices a mutant if it holds without it and does not hold with it; calibrated claims are
inputs and do not count. Held-out cells notice it if their score leaves the bounds of BOUNDS.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from lab.claims.claims import Claim, Paper
from lab.claims.delivery import delivered_error
from lab.claims.findings import _counts
from lab.claims.predicted import Predicted, profile_of, strategy_of
from lab.claims.verdicts import judge
from lab.draw.text import markdown
from lab.exchange import grouping
from lab.exchange.onebit import OneBit
from lab.model.profile import Profile
from lab.settings.files import read_file
from lab.simulate import costs, step
from lab.simulate.fit import Group, Observation
from lab.simulate.hardware import Hardware, Link, Range
from lab.simulate.presets import parse
from lab.simulate.score import Score, held_out, score, scored_cells

PAPERS = ("kim2017", "tf_benchmarks", "horovod")
SCORES = Path(__file__).resolve().parents[2] / "docs/results/links.json"
BOUNDS = {"step": 0.12, "exposed": 0.08}  # worst error of a step, median error of the exchange
FACTORS = (0.5, 0.8, 1.25, 2.0)


@dataclass(frozen=True)
class Mutant:
    """One thing that is broken.

    Attributes:
        hardware, profile: what becomes of these.
        patches: replacements, as (object, attribute, value).
    """

    name: str
    hardware: Callable[[Hardware], Hardware] = lambda hardware: hardware
    profile: Callable[[Profile], Profile] = lambda profile: profile
    patches: tuple[tuple[Any, str, Any], ...] = field(default=())

    @contextmanager
    def alive(self) -> Iterator[None]:
        """Apply the mutant to all predictions."""
        with ExitStack() as stack:
            for where, name, value in self.patches:
                stack.enter_context(patch.object(where, name, value))
            own = lambda name, scale=1.0: self.profile(profile_of(name, scale))  # noqa: E731
            stack.enter_context(patch("lab.claims.predicted.profile_of", own))
            delivered_error.cache_clear()
            yield
        delivered_error.cache_clear()


def faster_links(factor: float, hardware: Hardware) -> Hardware:
    links = {
        way: replace(link, bandwidth_bytes_per_s=factor * link.bandwidth_bytes_per_s)
        for way in ("intra", "inter")
        if (link := getattr(hardware, way))
    }
    rates = tuple(factor * rate for rate in hardware.node_rates)
    return replace(hardware, node_rates=rates, **links)


def slower_codecs(factor: float, hardware: Hardware) -> Hardware:
    rate, call_s = hardware.codec_bytes_per_s / factor, factor * hardware.codec_s
    return replace(hardware, codec_bytes_per_s=rate, codec_s=call_s)


def with_values(hardware: Hardware, **values: float) -> Hardware:
    return replace(hardware, **values)


def as_tree(exchange: str) -> tuple[tuple[Any, str, Any], ...]:
    return ((costs, "CARDS", {**costs.CARDS, "Tree": costs.CARDS[exchange]}),)


def reversed_groups(*arguments: Any) -> list[list[str]]:
    return grouping.group(*arguments)[::-1]


def forgetful(self: OneBit, _residuals: object, like: Mapping[str, Any]) -> list[None]:
    return [None] * len(like)


MUTANTS = (
    *(Mutant(f"links x {f:g}", hardware=partial(faster_links, f)) for f in FACTORS),
    *(
        Mutant(f"compute time x {f:g}", profile=lambda p, f=f: p.scaled(time_scale=f))
        for f in FACTORS
    ),
    *(Mutant(f"bytes x {f:g}", profile=lambda p, f=f: p.scaled(f)) for f in (0.5, 2.0)),
    Mutant("contention 0", hardware=partial(with_values, contention=0.0)),
    Mutant("contention 0.5", hardware=partial(with_values, contention=0.5)),
    Mutant("tree as star", patches=as_tree("Star")),
    Mutant("tree as ring", patches=as_tree("Ring")),
    Mutant("codec x 4", hardware=partial(slower_codecs, 4.0)),
    Mutant("buckets in reverse order", patches=((step, "group", reversed_groups),)),
    Mutant("residual dropped", patches=((OneBit, "_kept", forgetful),)),
)
INTACT = Mutant("none")


def outcomes(mutant: Mutant) -> dict[Claim, str]:
    """Judge by predictions the claims of all papers that are no inputs."""
    found = {}
    with mutant.alive():
        for name in PAPERS:
            paper = Paper.parse(read_file("claims", name))
            counts = _counts(paper.model) if paper.model else None
            hardware = mutant.hardware(parse(read_file("hardware", paper.hardware)))
            verdicts = judge(paper, Predicted(paper.profile, hardware, counts=counts), None)
            found |= {v.claim: v.outcome for v in verdicts if v.claim.kind != "calibrated"}
    return found


def held_out_score(mutant: Mutant) -> Score:
    """Score the stored held-out cells, predicted on the stored hardware."""
    stored = json.loads(SCORES.read_text())
    cells = []
    with mutant.alive():
        for machine in stored["hardware"]:
            rows = [c for c in stored["cells"] if c["conditions"] == machine["conditions"]]
            hardware = mutant.hardware(_hardware(machine))
            group = _group(machine, hardware, rows, mutant.profile)
            cells += scored_cells(group)
    return score(held_out(cells), stored["noise_floor"] or 0.0)


def noticed_by(mutant: Mutant, intact: Mapping[Claim, str]) -> list[Claim]:
    """Return the claims that hold without the mutant and not with it."""
    found = outcomes(mutant)
    return [claim for claim, outcome in found.items() if intact[claim] == "holds" != outcome]


def leaves_bounds(found: Score) -> bool:
    return found.step[1] > BOUNDS["step"] or found.exposed[0] > BOUNDS["exposed"]


def _hardware(stored: Mapping[str, Any]) -> Hardware:
    node = {key: value for key, value in stored.items() if key not in ("conditions", "fitted")}
    links = {way: node[way] and Link(**node[way]) for way in ("intra", "inter")}
    assumed = tuple(Range(**each) for each in node["assumed"])
    lists = {key: tuple(node[key]) for key in ("node_rates", "protocols")}
    return Hardware(**{**node, **links, **lists, "assumed": assumed})


def _group(
    machine: Mapping[str, Any],
    hardware: Hardware,
    rows: list[Mapping[str, Any]],
    change: Callable[[Profile], Profile],
) -> Group:
    observations = tuple(
        Observation(
            row["strategy"],
            change(profile_of(row["profile"]).scaled(row["bytes_scale"])),
            strategy_of(row["strategy"]),
            row["world_size"],
            row["per_rank_batch_size"],
            tuple(row["steps_s"]),
        )
        for row in rows
    )
    return Group(machine["conditions"], observations, hardware, fitted=machine["fitted"])


def table() -> list[str]:
    """Write a line for each mutant: how many claims notice it, one of them, and the score."""
    intact = outcomes(INTACT)
    rows = [_row("(nothing broken)", [], held_out_score(INTACT))]
    for mutant in MUTANTS:
        rows.append(_row(mutant.name, noticed_by(mutant, intact), held_out_score(mutant)))
    header = ["mutant", "claims that notice", "for example", "held-out step, worst"]
    return markdown([*header, "exposed exchange, median", "cells notice"], rows)


def _row(name: str, claims: list[Claim], found: Score) -> list[str]:
    step_text, exposed = (f"{100 * error:.1f} %" for error in (found.step[1], found.exposed[0]))
    example = claims[0].says if claims else "–"
    notice = "yes" if leaves_bounds(found) else "no"
    return [name, str(len(claims)), example, step_text, exposed, notice]


HEAD = f"""\
# Mutants of the cost model, and what notices them

Generated by `python -m tests.support.mutants > docs/results/mutants.md`. Claims are those of
{", ".join(PAPERS)} that are no inputs, judged by predictions. Cells are the held-out ones of
[links.md](links.md): they notice a mutant if the worst step is off by more than
{100 * BOUNDS["step"]:.0f} %, or the exposed exchange in the median by more than
{100 * BOUNDS["exposed"]:.0f} %.
"""

if __name__ == "__main__":
    print("\n".join([HEAD, *table()]))
