"""The map of strategies, predicted below the measured one, and its scores."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from lab.advice.score import Map, map_chart, map_of, section, write_map
from lab.analysis.places import Place, Where
from lab.draw.chart import drawn
from lab.model.profile import Profile, replayed
from lab.settings.config import load
from lab.simulate.hardware import with_rate
from lab.simulate.predict import plain
from lab.simulate.score import Group, Observation
from tests.support.simulated import LINKED, strategy
from tests.support.svg import outside, overlapping

LINKS = "cluster.rate=100mbit"
SLOW = with_rate(LINKED, 1e7)  # where fewer bytes are faster: onebit is predicted
NAMES = ("none", "overlap", "onebit", "priority", "auto")


def of_replay(profile: str) -> Profile:
    settings = ["model=replay", f"profile={profile}", "model.bytes_scale=0.02"]
    found = replayed(plain(load(settings)))
    assert found
    return found


def found_of(steps_s: dict[str, dict[str, float]]) -> Map:
    """Make the map of places on four ranks, given seconds by profile and strategy."""
    cells, places = [], []
    for profile, seconds in steps_s.items():
        model = of_replay(profile)
        cells += [Observation(n, model, strategy(n), 4, 32, (s,)) for n, s in seconds.items()]
        turns = {("begin", turn): 1 + 1e-4 * turn for turn in range(3)}
        repeats = {n: {key: s * f for key, f in turns.items()} for n, s in seconds.items()}
        places.append(Place(Where(model.name, LINKS, 4, 128), repeats))
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
    at = f"alexnet_titanx of batch 128 at {LINKS}"
    assert "the fastest measured one in 50 [9, 91] % of 2 places" in text
    assert f"largest regret 57.9 %, {at}" in text
    assert f"worst 1.05 [1.05, 1.05], {at}" in text  # auto
    assert "exposed exchange 0.80" in text  # the geometric mean of 0.5 / 0.7 and 0.9
    assert "| vgg16_p100 | 4 | 128 | cluster.rate=100mbit | onebit | 4.00 [4.00, 4.00] |" in text
    assert "none 0.50, onebit 1.00, auto 1.05, priority 3.00, overlap 4.00 |" in text


def test_disagreements_are_framed(found: Map, tmp_path: Path) -> None:
    chart = map_chart(found)
    (data,) = chart.spec()["datasets"].values()
    assert [(one["panel"], one["fastest"]) for one in data if one["marked"]] == [
        ("predicted", "onebit")
    ]
    assert chart.message.startswith("At 1 of 2 places on 4 ranks no strategy was shown")
    assert chart.about[-1] == "black frame: measured slower than the fastest"
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
