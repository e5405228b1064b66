"""Mutants: the cost model with one thing broken, and what notices.

    python -m tests.support.mutants > docs/results/mutants.md

A claim notices a mutant if it holds without it and does not hold with it, on the hardware of its
file or with the terms learned from other sources; inputs do not count.
Published figures notice it if, with learned terms, a paper's median error more than doubles, beyond
2 %. Held-out cells notice it if a score leaves BOUNDS.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

from lab.claims.claims import Claim, Paper
from lab.claims.findings import EVIDENCE, OTHERS, ClaimVerdict, counts_of_model, judge, verify_all
from lab.claims.metrics import delivered_error
from lab.claims.predicted import (
    Perturbation,
    Predicted,
    hardware_of,
    preset_of,
    profile_of,
    strategy_of,
)
from lab.draw.text import in_words, markdown
from lab.exchange import grouping
from lab.exchange.base import Exchange
from lab.exchange.memory import Bound, Memory
from lab.exchange.paths import Ring, Star, Tree
from lab.model.profile import Profile
from lab.settings.files import choices_of, read_file
from lab.simulate import strategy
from lab.simulate.hardware import Hardware, Link, Range
from lab.simulate.score import Group, Observation, Score, held_out, score, scored_cell

PAPERS = ("kim2017", "tf_benchmarks", "tf_parameter_server", "horovod", "nvidia_dle")
SCORES = Path(__file__).resolve().parents[2] / "docs/results/links.json"
# Of median errors. The cells were measured when values that 1-bit SGD does not encode travelled in
# an all-reduce of their own, so that it took 2 ms longer.
BOUNDS = {"step": 0.045, "exposed": 0.08, "compressed": 0.6}
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
            other = lambda name, origin=None: self.hardware(hardware_of(name, origin))  # noqa: E731
            stack.enter_context(patch("lab.claims.predicted.hardware_of", other))
            delivered_error.cache_clear()
            yield
        delivered_error.cache_clear()


def slower_codecs(factor: float, hardware: Hardware) -> Hardware:
    rates = tuple((name, rate / factor) for name, rate in hardware.codec_rates)
    rate, call_s = hardware.codec_bytes_per_s / factor, factor * hardware.codec_s
    return replace(hardware, codec_bytes_per_s=rate, codec_s=call_s, codec_rates=rates)


def with_values(hardware: Hardware, **values: float) -> Hardware:
    return replace(hardware, **values)


def as_tree(exchange: type[Exchange]) -> tuple[tuple[Any, str, Any], ...]:
    return ((Tree, "add_cost", exchange.add_cost),)


def reversed_groups(*arguments: Any) -> list[list[str]]:
    return grouping.group(*arguments)[::-1]


MUTANTS = (
    *(Mutant(f"links x {f:g}", hardware=Perturbation(links=f).of) for f in FACTORS),
    *(
        Mutant(f"compute time x {f:g}", profile=lambda p, f=f: p.scaled(time_scale=f))
        for f in FACTORS
    ),
    *(Mutant(f"bytes x {f:g}", profile=lambda p, f=f: p.scaled(f)) for f in (0.5, 2.0)),
    Mutant("contention 0", hardware=partial(with_values, contention=0.0, wire_passes=0.0)),
    Mutant("contention 0.5", hardware=partial(with_values, contention=0.5)),
    Mutant("tree as star", patches=as_tree(Star)),
    Mutant("tree as ring", patches=as_tree(Ring)),
    Mutant("codec x 8", hardware=partial(slower_codecs, 8.0)),
    Mutant("buckets in reverse order", patches=((strategy, "group", reversed_groups),)),
    Mutant("residual dropped", patches=((Memory, "bind", lambda *_: Bound(None)),)),
)
INTACT = Mutant("(nothing broken)")


@cache
def machines(name: str) -> tuple[Paper, tuple[Hardware, ...]]:
    """Return a paper, its preset, and this with the learned terms if it takes any."""
    paper = Paper.parse(read_file("claims", name))
    assert paper.hardware
    presets = preset_of(paper.hardware), hardware_of(paper.hardware, paper.origin)
    return paper, presets if presets[1].learned else presets[:1]


def outcomes(mutant: Mutant) -> dict[tuple[Claim, int], str]:
    """Judge by predictions the claims of all papers that are no inputs, on each machine."""
    found = {}
    papers = [machines(name) for name in PAPERS]  # learned before anything is broken
    with mutant.alive():
        for paper, presets in papers:
            assert paper.profile
            counts = counts_of_model(paper.model) if paper.model else None
            for number, preset in enumerate(presets):
                facts = Predicted(paper.profile, mutant.hardware(preset), network=counts)
                for verdict in judge(paper, facts, None):
                    if verdict.claim.role != "input":
                        found[verdict.claim, number] = verdict.outcome
    return found


def held_out_scores(mutant: Mutant) -> tuple[Score, Score]:
    """Score the stored held-out cells on the stored hardware: all, and those that compress."""
    stored = json.loads(SCORES.read_text())
    cells = []
    with mutant.alive():
        for machine in stored["hardware"]:
            rows = [c for c in stored["cells"] if c["conditions"] == machine["conditions"]]
            hardware = mutant.hardware(_hardware(machine))
            group = _group(machine, hardware, rows, mutant.profile)
            cells += [scored_cell(group, cell) for cell in group.observations]
    least = stored["noise_floor"] or 0.0
    scored = held_out(cells)
    return score(scored, least), score([c for c in scored if c.strategy in COMPRESS], least)


def noticed_by(mutant: Mutant, intact: Mapping[tuple[Claim, int], str]) -> list[Claim]:
    """Return the claims that hold without the mutant and not with it."""
    found = outcomes(mutant)
    noticed = (c for c, outcome in found.items() if intact[c] == "holds" != outcome)
    return list(dict.fromkeys(claim for claim, _ in noticed))


def figure_errors(mutant: Mutant) -> dict[str, float]:
    """Return the median error of each paper's figures, with its terms learned before the mutant."""
    errors = {}
    learned = [machines(name) for name in PAPERS if len(machines(name)[1]) > 1]
    with mutant.alive():
        for paper, (_, hardware) in learned:
            assert paper.profile
            facts = Predicted(paper.profile, mutant.hardware(hardware))
            figures = [claim for claim in paper.claims if claim.is_figure]
            ratios = [(c.value(facts) or 0) / (c.published or 1) for c in figures]
            errors[paper.title] = median(abs(ratio - 1) for ratio in ratios)
    return errors


def figures_notice(found: Mapping[str, float], intact: Mapping[str, float]) -> bool:
    return any(error > max(0.02, 2 * intact[title]) for title, error in found.items())


def leaves_bounds(found: tuple[Score, Score]) -> bool:
    every, compressed = found
    return (
        every.step[0] > BOUNDS["step"]
        or every.exposed[0] > BOUNDS["exposed"]
        or compressed.exposed[0] > BOUNDS["compressed"]
    )


def _hardware(stored: Mapping[str, Any]) -> Hardware:
    node = {key: value for key, value in stored.items() if key not in ("conditions", "fitted")}
    links = {way: node[way] and Link(**node[way]) for way in ("intra", "inter")}
    assumed = tuple(Range(**each) for each in node["assumed"])
    lists = {key: tuple(node[key]) for key in ("node_rates", "protocols")}
    lists["codec_rates"] = tuple((name, rate) for name, rate in node["codec_rates"])
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


COMPRESS = ("onebit", "cntk", "int8", "signsgd_ef", "topk", "randomk", "powersgd")


def table() -> list[str]:
    """Write a line for each mutant: how many claims notice it, one of them, and the score."""
    intact = outcomes(INTACT)
    errors = figure_errors(INTACT)
    rows = []
    for mutant in (INTACT, *MUTANTS):
        claims, found = noticed_by(mutant, intact), held_out_scores(mutant)
        figures = "yes" if figures_notice(figure_errors(mutant), errors) else "no"
        rows.append([mutant.name, *_claims(claims), figures, *_cells(found)])
    header = ["mutant", "claims", "one of these claims", "figures", "step time", "exposed exchange"]
    return markdown([*header, "exposed, compressed", "cells"], rows)


def _claims(claims: list[Claim]) -> tuple[str, str]:
    return str(len(claims)), claims[0].says if claims else "–"


def _cells(found: tuple[Score, Score]) -> tuple[str, ...]:
    every, compressed = found
    errors = every.step[0], every.exposed[0], compressed.exposed[0]
    notice = "yes" if leaves_bounds(found) else "no"
    return *(f"{100 * error:.1f} %" for error in errors), notice


def evidence_table() -> list[str]:
    """Write how many claims of each paper are evidence, and why others are not."""
    found = verify_all(choices_of("claims"))
    rows = [[name, *_worth(found.verdicts)] for name, found in found.items()]
    every = [verdict for each in found.values() for verdict in each.verdicts]
    others = (several.removeprefix("of ") for _, several in OTHERS.values())
    header = ["paper", "said by the source", *EVIDENCE, *others, "why arithmetic"]
    return markdown(header, [*rows, ["all", *_worth(every)]])


def _worth(verdicts: Sequence[ClaimVerdict]) -> list[str]:
    said = sum(each.claim.role == "statement" for each in verdicts)
    kinds = Counter(each.kind for each in verdicts)
    parts = (each.why.partition(" “") for each in verdicts if each.why)
    why = Counter(f"{text} another claim" if quote else text for text, quote, _ in parts)
    reasons = "; ".join(f"{number}: {text}" for text, number in sorted(why.items())) or "–"
    return [str(said), *(str(kinds[kind]) for kind in (*EVIDENCE, *OTHERS)), reasons]


HEAD = f"""\
# Mutants of the cost model, and the checks that detect them

A mutant is a copy of the cost model in which one part is broken on purpose. The table shows which
checks detect each mutant. `python -m tests.support.mutants > docs/results/mutants.md` generates
this page.

* The column "claims" gives the number of claims that detect the mutant. These claims are in the
  files {in_words(PAPERS)} in conf/claims.
  A claim detects a mutant if it holds for the intact model but not for the mutant. The value of
  each claim is predicted both with and without [learned terms](../learned_terms.md). Claims whose
  figures are model inputs are not counted.
* The column "figures" is "yes" if, for at least one paper, the median error of the predicted
  figures is more than twice that of the intact model, and also exceeds 2 %. These predictions use
  learned terms.
* The column "cells" is "yes" if one of the three median errors in the columns before it exceeds its
  bound. The errors are those of the held-out cells of [links.md](links.md), which are measured runs
  that nothing was fitted to. The bound is {100 * BOUNDS["step"]:g} % for the step time and
  {100 * BOUNDS["exposed"]:g} % for the exposed exchange. For the exposed exchange of strategies
  that compress, the bound is {100 * BOUNDS["compressed"]:g} %.
"""
WORTH = """
## Claims that count as evidence

A claim counts as evidence if it could have failed, and if it follows neither from model inputs nor
from another claim. To find out whether a claim could have failed, we multiply the link speed, the
compute time or the number of bytes by 0.5, 0.71, 1.41 and 2. For a counted or measured claim, we
multiply the count or the measured value instead. The claim could have failed if it fails with at
least one of these changes, or if it fails without any change. The rules are in
lab/claims/findings.py.

A claim of the kind "measured" becomes evidence when its value has been measured on the same kind of
device as in the source. At first, we assigned the kinds by hand, and we counted 224 of 280 claims
as evidence. The rules above accept only 98 of these 224 claims without a measurement, because they
are counted or predicted. They accept another 54 only after a measurement on the right kind of
device.
"""

if __name__ == "__main__":
    print("\n".join([HEAD, *table(), WORTH, *evidence_table()]))
