"""The map of strategies: places, leaders, comparisons, and the figure."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from lab.analysis.places import MapPlace, Place, against, behind, places_of, summary
from lab.analysis.records import load_study
from lab.plot import main
from tests.support.commands import said
from tests.support.records import leave, make_record
from tests.support.svg import boxes_of, outside, overlapping

HERE = MapPlace("vgg", "", 4, 256)


def place(**seconds: list[float]) -> Place:
    return Place(HERE, {name: dict(enumerate(times)) for name, times in seconds.items()})


def measured(folder: Path, strategy: str, rate: str, seconds: float, **changes: Any) -> None:
    """Leave three repeats of a run of four ranks over links of a rate."""
    own = changes.pop("own", {})
    ranks = changes.pop("ranks", 4)
    for repeat in range(3):
        typed = {"cluster.rate": rate, "profile": "vgg", **own}
        name = "-".join([strategy, rate, str(repeat), *own.values(), *map(str, changes.values())])
        record = make_record(
            strategy, ranks, seconds * (1 + 0.001 * repeat), batch_size=256, repeat=repeat,
            variant=typed, settings={**typed, "model.profile.name": "vgg"}, **changes,
        )  # fmt: skip
        leave(folder / f"{name}-{ranks}", record)


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """Fast links, where nothing differs, and slow ones, where onebit leads."""
    for strategy, slow in (("none", 0.1), ("overlap", 0.4), ("onebit", 0.2), ("auto", 0.15)):
        measured(tmp_path, strategy, "1gbit", 0.2)
        measured(tmp_path, strategy, "300mbit", slow)
    return tmp_path


def test_a_place_is_a_model_with_links_ranks_and_batch(study: Path) -> None:
    measured(study, "tree", "1gbit", 0.1, transform="FCToConv")
    measured(study, "tree", "1gbit", 0.1, scaling="weak")
    measured(study, "tree", "1gbit", 0.1, ranks=1)
    measured(study, "priority", "1gbit", 0.3, own={"sync.chunk_mb": "4"})
    fast, slow = sorted(places_of(load_study(study).cells), key=lambda one: one.where.links)
    assert fast.where == MapPlace("vgg", "cluster.rate=1gbit", 4, 256)
    assert slow.where == MapPlace("vgg", "cluster.rate=300mbit", 4, 256)
    assert [*fast.steps_s] == ["none", "overlap", "priority", "onebit", "auto"]
    assert slow.steps_s["onebit"] == pytest.approx({0: 0.2, 1: 0.2002, 2: 0.2004})
    measured(study, "priority", "1gbit", 0.2, own={"sync.chunk_mb": "8"})
    (fast,) = (one for one in places_of(load_study(study).cells) if "1gbit" in one.where.links)
    assert [name.rpartition(" ")[2] for name in fast.steps_s if name.startswith("priority")] == [
        "sync.chunk_mb=4",
        "sync.chunk_mb=8",
    ]


def test_neither_none_nor_auto_leads() -> None:
    one = place(none=[1, 1, 1], auto=[1.5] * 3, onebit=[2.0, 2.001, 2.002], overlap=[4, 4, 4])
    lead = one.lead(math.nan)
    assert (lead.name, lead.others) == ("onebit", ())
    assert lead.factor.mid == pytest.approx(1.999, abs=1e-3)
    assert [*behind(one)] == ["none", "auto", "onebit", "overlap"]


def test_strategies_of_different_starts_are_compared_by_their_means() -> None:
    apart = {"overlap": {("a", 0): 2.0, ("a", 1): 2.0}, "auto": {("b", 0): 3.0}, "tree": {0: 1.0}}
    one = Place(HERE, apart)
    ratio = one.ratio("auto", "overlap")
    assert ratio.mid == pytest.approx(1.5) and math.isnan(ratio.lo)
    assert [*behind(one)] == ["tree", "overlap", "auto"]
    assert math.isnan(one.ratio("priority", "overlap").mid)


def test_what_noise_hides_is_named() -> None:
    near = {"onebit": [2.0, 2.2, 2.1], "overlap": [2.1, 2.1, 2.2], "tree": [9.0, 9.1, 9.0]}
    assert place(**near).lead(math.nan).others == ("overlap",)
    assert place(onebit=[2.0, 2.0, 2.0], overlap=[2.1, 2.1, 2.1]).lead(0.1).others == ("overlap",)
    assert place(onebit=[2.0], overlap=[9.0]).lead(math.nan).others == ("overlap",)


def test_exposed_exchange_is_compared_where_it_is_no_noise() -> None:
    one = place(none=[1, 1, 1], overlap=[1.4] * 3, priority=[1.2, 1.2, 1.2])
    assert one.exposed_ratio("priority", "overlap", 0.1).mid == pytest.approx(0.5)
    assert math.isnan(one.exposed_ratio("priority", "overlap", 0.3).mid)
    assert math.isnan(place(overlap=[1], priority=[1]).exposed_ratio("priority", "overlap", 0).mid)
    hidden = place(none=[1, 1], overlap=[1.4, 1.4], priority=[1.2, 0.9])
    assert math.isnan(hidden.exposed_ratio("priority", "overlap", 0).mid)


def test_comparisons_are_summarised_over_places() -> None:
    places = [
        place(none=[1] * 3, overlap=[2] * 3, priority=[x] * 3, auto=[1.5] * 3) for x in (1.5, 2.1)
    ]
    assert summary([], 0.02) is None
    found = summary(against(places, "priority", "overlap", math.nan), 0.02)
    assert found and found.step.mid == pytest.approx(math.sqrt(0.75 * 1.05))
    assert found.exposed.mid == pytest.approx(math.sqrt(0.5 * 1.1))
    assert (found.beyond.mid, found.num_exposed, found.worst.step.mid) == (0.5, 2, 1.05)
    assert found.beyond.lo < 0.2 and found.beyond.hi > 0.8
    regrets = [each.step.mid for each in against(places, "auto", None, math.nan)]
    assert regrets == pytest.approx([1.0, 0.75])


def test_the_map_is_drawn_of_several_links(study: Path, tmp_path: Path) -> None:
    assert main([str(study), "only=map", "format=svg", f"out={tmp_path}/out"]) == 0
    drawn = (tmp_path / "out/map_of_strategies.svg").read_text()
    assert overlapping(drawn) == outside(drawn) == []
    found = [box.text for box in boxes_of(drawn)]
    assert {"On 4 ranks, overlap and onebit are each fastest in 1 of 2 cases", "vgg"} <= set(found)
    assert {"batch 256", "onebit", "≈ onebit", "× 2.00 [2.00, 2.00]"} <= set(found)
    assert found.index("300mbit") < found.index("1gbit")


def test_a_study_of_one_link_has_no_map(tmp_path: Path) -> None:
    for strategy in ("overlap", "onebit"):
        measured(tmp_path, strategy, "1gbit", 0.2)
    out = said(main, str(tmp_path), "only=map")
    assert "skipped" not in out and "wrote" not in out


def test_a_lead_without_the_reference_has_no_factor() -> None:
    assert math.isnan(place(onebit=[2], tree=[3]).lead(math.nan).factor.mid)
