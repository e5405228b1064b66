"""Scores of advice: its first choice against the best measured cell."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from lab import score as command
from lab.advice.score import choices, report
from lab.model.profile import Profile, replayed
from lab.settings.config import load
from lab.settings.files import choices_of, conf_dir
from lab.simulate.hardware import with_rate
from lab.simulate.predict import plain
from lab.simulate.score import Group, Observation
from lab.study.grid import Cell
from lab.study.grid import read as read_grid
from tests.support.simulated import LINKED, TRUE, leave_study, strategy

STUDY = conf_dir() / "study/advice.yaml"


def of_replay(*settings: str) -> Profile:
    found = replayed(plain(load(["model=replay", *settings])))
    assert found
    return found


def observed(name: str, step_s: float, size: int = 4, profile: str = "vgg16_p100") -> Observation:
    model = of_replay(f"profile={profile}", "model.bytes_scale=0.02")
    return Observation(name, model, strategy(name), size, 32, (step_s,))


def test_regret_is_of_measured_steps() -> None:
    slow = with_rate(LINKED, 1e7)  # where fewer bytes are faster
    cells = (
        observed("onebit", 0.30), observed("overlap", 0.40), observed("tree", 0.25),
        observed("none", 0.1), observed("tree", 0.1, size=2), observed("overlap", 0.1, size=2),
        observed("tree", 0.1, profile="resnet50_p100"),
    )  # fmt: skip
    found = choices([Group("rate=1", cells, slow, (replace(slow, contention=0.2),))])
    every, exact = found  # fitted cells, `none`, and a single strategy are no choice
    assert (every.kind, every.num_strategies, every.chosen, every.best) == (
        *("any", 3),
        *("onebit", "tree"),
    )
    assert every.regret == pytest.approx(0.2)
    assert (exact.kind, exact.chosen, exact.best) == ("exact", "overlap", "tree")
    assert exact.regret == pytest.approx(0.6)
    lines = report(found)
    assert "in 0 of 1 scenarios; largest regret 20.0 %" in lines[0]
    assert "| rate=1 | vgg16_p100 | 4 | 128 | 3 | onebit |" in lines[-2]
    assert report([]) == []


@pytest.mark.slow
def test_a_simulated_study_is_scored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study, scale = tmp_path / "study", "model.bytes_scale=0.02"
    names = ("allreduce", "overlap", "onebit")
    for profile, rate, sizes, batch_size in (
        ("alexnet_titanx", 1.0, (1, 2), 384),
        ("resnet50_p100", 1.0, (4,), 96),
        ("vgg16_p100", 0.3, (4,), 64),
    ):
        link = f"cluster.rate={round(1000 * rate)}mbit"
        settings = ("cluster=emulated", link, "model=replay", f"profile={profile}", scale)
        links = with_rate(TRUE, 1.1e8 * rate)
        every = ("none", *names) if batch_size == 384 else names
        model = of_replay(f"profile={profile}", scale)
        leave_study(study, model, every, links, *settings, sizes=sizes, batch_size=batch_size)
    out = tmp_path / "scores.md"
    assert command.main([str(study), f"out={out}"]) == 0
    text = capsys.readouterr().out
    for kind in ("all", "exact"):
        good = "the first choice is within 5 % of the best measured cell in 2 of 2 scenarios"
        assert f"among {kind} strategies, {good}" in text
    page = out.read_text()
    assert page.index("## Advice") < page.index("## Every cell")
    assert "| cluster.rate=300mbit | vgg16_p100 | 4 | 64 | 3 |" in page


def test_a_study_without_scenarios_has_no_section(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = of_replay("profile=alexnet_titanx", "model.bytes_scale=0.02")
    replay = ("model=replay", "profile=alexnet_titanx", "model.bytes_scale=0.02")
    leave_study(tmp_path / "study", model, ("none", "tree"), TRUE, *replay)
    assert command.main([str(tmp_path / "study")]) == 0
    assert "Advice" not in capsys.readouterr().out


def scenario(cell: Cell) -> tuple[str, str, int, int]:
    settings = cell.settings
    return settings["profile.name"], settings["cluster.rate"], cell.world_size, cell.batch_size


def test_the_study_of_advice_has_ten_scenarios_that_are_not_fitted() -> None:
    head = STUDY.read_text()
    (names,) = re.findall(r"S=([\w,]+)\.", head)
    assert set(names.split(",")) < set(choices_of("strategy"))
    assert f"\nstrategy: none,{names}\n" in head
    lines = re.findall(r"^#   python -m lab\.sweep (.*)$", head, re.MULTILINE)
    one = [line.replace("strategy=$S", "").split() for line in lines]  # strategies are all alike
    fitted, *others = [read_grid([*line, "strategy=tree"]).cells for line in one]
    held_out = [cell for cells in others for cell in cells]
    assert {cell.world_size for cell in fitted} == {1, 2}
    assert len({scenario(cell) for cell in held_out}) == len(held_out) == 10
    for place in (0, 3):  # model and batch
        assert not {scenario(c)[place] for c in fitted} & {scenario(c)[place] for c in held_out}
    assert {cell.world_size for cell in held_out} == {3, 4}
    assert {cell.config.steps for cell in [*fitted, *held_out]} == {16}
