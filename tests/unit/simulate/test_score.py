"""Scores of predictions, on cells that were not fitted; nothing that a study names is called."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from lab import score as command
from lab.claims.predicted import profile_of
from lab.draw.chart import drawn
from lab.simulate.hardware import Link, with_rate
from lab.simulate.score import ScoredCell, held_out, score
from lab.simulate.scorecard import chart, of_study, summary
from tests.support.commands import refusal, said
from tests.support.records import leave, make_record
from tests.support.simulated import TRUE, leave_study
from tests.support.svg import outside, overlapping

CELL = ScoredCell(
    "tree", "p", 4, 128, (0.2, 0.1, 0.3), 0.22, (0.1, 0.12), "held out", False, "rate=1gbit"
)


GUESS = """\
name: guess
source: made up
library: gloo
ranks_per_node: 1
intra: null
inter: {latency_s: 1.0e-4, bandwidth_bytes_per_s: 2.0e+8}
codec_bytes_per_s: 2.0e+10
"""


def test_the_exchange_is_scored_apart_from_the_step() -> None:
    assert CELL.error == pytest.approx(0.1)
    assert CELL.exposed_s == pytest.approx((0.1, 0.1)) and CELL.exposed_error == pytest.approx(0)
    hidden = replace(CELL, alone_s=(0.21, 0.1))
    assert math.isnan(hidden.exposed_error)
    unknown = replace(CELL, alone_s=(math.nan, 0.1))
    found = score([CELL, hidden, unknown])
    assert (found.num_cells, found.num_exposed) == (3, 1)
    assert found.exposed == pytest.approx((0, 0)) and math.isnan(found.signed_error)
    assert score([CELL], least_exposed=0.6).num_exposed == 0  # half of the step is exposed


def test_overlapped_steps_have_a_sign() -> None:
    fast, slow = (replace(CELL, overlaps=True, predicted_s=s) for s in (0.18, 0.21))
    found = score([fast, slow, CELL])
    assert found.signed_error == pytest.approx(-0.025)
    assert found.step == (pytest.approx(0.1), pytest.approx(0.1))
    assert "overlapped steps -2.5 % on average" in str(found)


def test_only_held_out_cells_with_an_exchange_count() -> None:
    none, fitted = replace(CELL, strategy="none"), replace(CELL, evidence="fitted")
    alone = replace(CELL, strategy="fsdp", world_size=1)  # which no fit uses, and sends nothing
    assert held_out([none, fitted, alone, CELL]) == [CELL]


def test_an_error_that_rounds_to_zero_has_no_minus() -> None:
    near = replace(CELL, overlaps=True, predicted_s=0.19999)
    assert "overlapped steps +0.0 % on average" in str(score([near]))


def test_a_single_cell_is_singular() -> None:
    text = score([replace(CELL, linear_s=0.1)]).in_sentences()
    assert "For the 1 held-out cell with" in text and "For the 1 cell, linear scaling" in text


@pytest.mark.slow
def test_a_study_is_fitted_on_one_link_and_scored_on_others(tmp_path: Path) -> None:
    profile = replace(profile_of("alexnet_titanx"), bytes_scale=0.02)
    study, names = tmp_path / "study", ("none", "tree", "allreduce", "overlap", "onebit")
    fast, slow = (
        ("cluster=emulated", "cluster.rate=1gbit"),
        ("cluster=emulated", "cluster.rate=100mbit"),
    )
    leave_study(study, profile, names, TRUE, *fast)
    leave_study(study, profile, names, with_rate(TRUE, 1.1e7), *slow, sizes=(4,))
    straggler = ("cluster.slow_host=h1", "cluster.slow_factor=1.5")
    late = replace(TRUE, num_slow=1, slow_factor=1.5)
    leave_study(study, profile, names, late, *fast, *straggler, sizes=(4,))
    for group, text in (("profile", profile.to_yaml()), ("hardware", GUESS)):
        (tmp_path / "conf" / group).mkdir(parents=True)
        (tmp_path / "conf" / group / "own.yaml").write_text(text)
    out = tmp_path / "scores.md"
    words = [str(study), "profile=own", "hardware=own", f"config_dir={tmp_path}/conf", f"out={out}"]
    text = said(command.main, *words).partition("## Advice")[0]
    assert "fitted to the cells on 1 and 2 ranks at cluster.rate=1gbit" in text
    rows = {
        line.split("|")[1].strip(): line.split("|") for line in text.splitlines() if "|" in line
    }
    assert rows["cluster.rate=100mbit"][2].strip() == rows["cluster.rate=1gbit"][2].strip() == "4"
    assert all(float(cell.strip(" %")) < 3 for cell in rows["**all**"][3:5])
    assert set(names) - {"none"} <= rows.keys()
    assert out.with_suffix(".png").is_file()
    assert out.read_text().count("| held out |") == 15
    assert f"cluster.rate=1gbit {' '.join(sorted(straggler))}" in rows


def test_hosts_of_two_ranks_are_fitted_inside_and_scored_on_two(tmp_path: Path) -> None:
    """Links between hosts are those of the fit of one rank on each; FSDP2's cells are not used."""
    profile = replace(profile_of("alexnet_titanx"), bytes_scale=0.02)
    study, rate = tmp_path / "study", ("cluster=emulated", "cluster.rate=1gbit")
    leave_study(study, profile, ("none", "allreduce", "overlap", "onebit", "fsdp"), TRUE, *rate)
    levels = replace(TRUE, ranks_per_node=2, intra=Link(3e-4, 5e8))
    names = ("none", "hierarchical", "hierarchical_onebit", "hsdp")
    two = ("cluster.ranks_per_host=2",)
    leave_study(study, profile, names, levels, *rate, *two, sizes=(2, 4))
    slow = replace(levels, inter=Link(4e-4, 1.1e8 * 0.3))
    leave_study(study, profile, names, slow, rate[0], "cluster.rate=300mbit", *two, sizes=(4,))
    hardware = yaml.safe_load(GUESS)
    hardware["intra"] = {"latency_s": 1e-4, "bandwidth_bytes_per_s": 1e9}
    hardware["codec_bytes_per_s"] = TRUE.codec_bytes_per_s  # FSDP2's copies have this rate, too
    card = of_study(study, yaml.safe_load(profile.to_yaml()), hardware)
    held = {(cell.conditions, cell.strategy): cell for cell in held_out(card.cells)}
    assert len(held) == 4 + 3 + 3
    evidence = {(cell.strategy, cell.world_size): cell.evidence for cell in card.cells}
    assert evidence["overlap", 2] == "fitted"
    assert evidence["fsdp", 1] == evidence["fsdp", 2] == evidence["hsdp", 2] == "held out"
    # Two ranks of a host tell links inside from contention less well, and hsdp is not used at all.
    assert all(abs(cell.error) < 0.06 for cell in held.values()), held
    coarse = ("hierarchical_onebit", "hsdp")
    assert all(abs(c.error) < 0.01 for (_, name), c in held.items() if name not in coarse)
    hardware["intra"] = None
    with pytest.raises(ValueError, match=r"cluster\.ranks_per_host=2: hardware=guess has no intra"):
        of_study(study, yaml.safe_load(profile.to_yaml()), hardware)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "nowhere: no such folder"),
        ([], "needs one runs/STUDY"),
        (["runs", "hardware=eth1g"], "hardware=eth1g: did you mean eth10g? allowed:"),
        (["runs", "out=scores.pdf"], "out=scores.pdf: must name FILE.md"),
        (["published", "hardware=h100_x8"], "hardware=h100_x8: applies to a study, not to"),
    ],
)
def test_a_wrong_word_is_one_line(words: list[str], message: str) -> None:
    assert message in refusal(command.main, *words)


def test_without_none_the_step_is_drawn(tmp_path: Path) -> None:
    profile = replace(profile_of("alexnet_titanx"), bytes_scale=0.02)
    fast = ("cluster=emulated", "cluster.rate=1gbit")
    leave_study(tmp_path / "study", profile, ("tree", "allreduce", "overlap"), TRUE, *fast)
    parsed = (yaml.safe_load(text) for text in (profile.to_yaml(), GUESS))
    card = of_study(tmp_path / "study", *parsed)
    assert "a step longer. It is not scored, because" in "\n".join(summary(card))
    found = chart(card)
    assert found.message == "Step: 3 of 3 predictions are within 30 % of what was measured"
    svg = drawn(found.spec(), "svg").decode()
    assert overlapping(svg) == outside(svg) == []


SETTINGS = """\
strategy: allreduce
cluster: {_target_: os.mkdir, path: ran}
exchange: {_target_: os.mkdir}
sync: {_target_: os.mkdir}
overlap: false
"""


def test_a_study_of_a_stranger_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for size in (1, 2):
        cell = tmp_path / "stranger" / f"n{size}"
        environment = {"hostname": "h", "cpu": "\x1b[2J"}
        leave(cell, make_record("allreduce", size, 0.1, environment=environment))
        (cell / "config.yaml").write_text(SETTINGS)
    assert "\x1b" not in refusal(command.main, "stranger")
    assert not (tmp_path / "ran").exists()
