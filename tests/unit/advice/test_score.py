"""Choices and the map of strategies, held to what was measured."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from lab import score as command
from lab.advice.advise import constant_of, verdict
from lab.advice.score import Map, choices, map_chart, map_of, report, section, write_map
from lab.analysis.places import MapPlace, Place
from lab.draw.chart import drawn
from lab.model.profile import Profile, replayed
from lab.settings.config import load
from lab.settings.files import choices_of, conf_dir
from lab.simulate.hardware import with_rate
from lab.simulate.predict import plain
from lab.simulate.score import Group, Observation
from lab.study.grid import Cell
from lab.study.grid import read as read_grid
from tests.support.commands import said
from tests.support.simulated import LINKED, TRUE, leave_study, strategy
from tests.support.svg import outside, overlapping

STUDY = conf_dir() / "studies/advice.yaml"


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
    assert (every.kind, len(every.cells), every.chosen.name, every.best.name) == (
        *("any", 3),
        *("onebit", "tree"),
    )
    assert every.regret == pytest.approx(0.2)
    assert (exact.kind, exact.chosen.name, exact.best.name) == ("exact", "overlap", "tree")
    assert exact.regret == pytest.approx(0.6)
    lines = report(found)
    assert lines[0].startswith("- A scenario is one model")
    assert "in 0 of 1 scenarios. The largest regret is 20.0 %." in lines[1]
    assert "needs a strategy that appears in all of several scenarios" in lines[2]
    assert "| rate=1 | vgg16_p100 | 4 | 128 | 3 | onebit |" in lines[-2]
    assert report([]) == []


def test_skill_is_over_the_best_strategy_to_take_everywhere() -> None:
    regrets = [{"a": 0.0, "b": 0.06, "c": 0.0}, {"a": 0.3, "b": 0.0}, {"b": 0.04, "a": 0.0}]
    found = constant_of([0.01, 0.0, 0.04], regrets)
    assert found
    assert (found.name, found.num_close, found.num_shared) == ("b", 0, 2)  # c is not everywhere
    assert found.skill == pytest.approx(0.5)
    better = verdict("advice", found)
    assert "beats the constant choice (skill 0.50)" in better
    assert better.endswith("the regret of advice is 1.7 % on average and 4.0 % at most.")
    assert "(skill -2.00)" in verdict("advice", constant_of([0.1, 0.1, 0.1], regrets))
    for alone in ([{"a": 0.0}], [{"a": 0.0}, {"b": 0.0}]):  # no constant choice to speak of
        assert "cannot be compared" in verdict("advice", constant_of([0.0] * len(alone), alone))
    only = constant_of([0.0, 0.0], [{"a": 0.0, "b": 0.1}, {"a": 0.1, "c": 0.0}])
    assert "No other strategy appears in all 2 scenarios." in verdict("advice", only)


@pytest.mark.slow
def test_a_simulated_study_is_scored(tmp_path: Path) -> None:
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
    text = said(command.main, str(study), f"out={out}")
    for kind in ("all", "exact"):
        good = "the first choice of the advice is within 5 % of the fastest strategy in 2 of 2"
        assert f"Among {kind} strategies, {good}" in text
    page = out.read_text()
    assert page.index("## Advice") < page.index("## Every cell")
    assert "| cluster.rate=300mbit | vgg16_p100 | 4 | 64 | 3 |" in page


def test_a_study_without_scenarios_has_no_section(tmp_path: Path) -> None:
    model = of_replay("profile=alexnet_titanx", "model.bytes_scale=0.02")
    replay = ("model=replay", "profile=alexnet_titanx", "model.bytes_scale=0.02")
    leave_study(tmp_path / "study", model, ("none", "tree"), TRUE, *replay)
    assert "Advice" not in said(command.main, str(tmp_path / "study"))


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


LINKS = "cluster.rate=100mbit"
SLOW = with_rate(LINKED, 1e7)  # where fewer bytes are faster: onebit is predicted
NAMES = ("none", "overlap", "onebit", "priority", "auto")


def found_of(steps_s: dict[str, dict[str, float]]) -> Map:
    """Make the map of places on four ranks, given seconds by profile and strategy."""
    cells, places = [], []
    for profile, seconds in steps_s.items():
        model = of_replay(f"profile={profile}", "model.bytes_scale=0.02")
        cells += [Observation(n, model, strategy(n), 4, 32, (s,)) for n, s in seconds.items()]
        turns = {("begin", turn): 1 + 1e-4 * turn for turn in range(3)}
        repeats = {n: {key: s * f for key, f in turns.items()} for n, s in seconds.items()}
        places.append(Place(MapPlace(model.name, LINKS, 4, 128), repeats))
    group = Group(LINKS, tuple(cells), SLOW, (replace(SLOW, contention=0.2),), fitted=False)
    return map_of(places, [group], math.nan)


@pytest.fixture
def found() -> Map:
    """A place where the prediction holds, and one where onebit was measured to be slower."""
    return found_of(
        {
            "vgg16_p100": dict(zip(NAMES, (0.1, 0.8, 0.2, 0.6, 0.21), strict=True)),
            "alexnet_titanx": dict(zip(NAMES, (0.1, 0.2, 0.3, 0.19, 0.2), strict=True)),
        }
    )


def test_predictions_are_judged_by_what_was_measured(found: Map) -> None:
    right, wrong = found.answers
    assert (right.measured.name, right.predicted.name, right.agrees) == ("onebit", "onebit", True)
    assert right.measured.factor.mid == pytest.approx(4)
    assert right.predicted.factor.mid > 1 and right.regret.mid == 1
    assert (wrong.measured.name, wrong.predicted.name) == ("priority", "onebit")
    assert not wrong.agrees and wrong.regret.mid == pytest.approx(0.3 / 0.19)
    assert found.summaries["auto"].worst.step.mid == pytest.approx(0.2 / 0.19)


def test_the_section_counts_and_names_the_worst(found: Map) -> None:
    text = "\n".join(section(found))
    at = f"alexnet_titanx at batch size 128 and {LINKS}"
    assert "- In 50 [9, 91] % of the 2 cases, the strategy that was predicted" in text
    assert f"The largest regret of the predicted strategy is 57.9 %, for {at}" in text
    assert f"The largest ratio of step times is 1.05 [1.05, 1.05], for {at}" in text  # auto
    assert "exposed exchange takes 0.80" in text  # the geometric mean of 0.5 / 0.7 and 0.9
    assert "| vgg16_p100 | 4 | 128 | cluster.rate=100mbit | onebit | 4.00 [4.00, 4.00] |" in text
    assert "none 0.50, onebit 1.00, auto 1.05, priority 3.00, overlap 4.00 |" in text


def test_disagreements_are_framed(found: Map, tmp_path: Path) -> None:
    chart = map_chart(found)
    (data,) = chart.spec()["datasets"].values()
    assert [(one["panel"], one["fastest"]) for one in data if one["marked"]] == [
        ("predicted", "onebit")
    ]
    assert chart.message.endswith("was measured to be the fastest in 1 of 2 cases")
    assert (
        chart.about[-1]
        == "black frame: the predicted strategy was measured to be slower than the fastest"
    )
    svg = drawn(chart.spec(), "svg").decode()
    assert overlapping(svg) == outside(svg) == []
    picture, numbers = write_map(found, tmp_path / "pays_map.md")
    assert picture.name == "pays_map.png"
    stored = json.loads(numbers.read_text())
    assert [one["agrees"] for one in stored["places"]] == [True, False]
    assert stored["places"][0]["over_fastest"]["overlap"]["mid"] == pytest.approx(4)
    assert list(stored["places"][0]["steps_s"]["overlap"]) == [f"begin turn {t}" for t in range(3)]


def test_without_held_out_places_there_is_no_map(tmp_path: Path) -> None:
    nothing = map_of([], [], math.nan)
    assert section(nothing) == [] and write_map(nothing, tmp_path / "map.md") == []
    assert not [*tmp_path.iterdir()]
