"""Charts of a study: their message, and no text on another one or outside of the picture."""

from __future__ import annotations

import math
from pathlib import Path

import pandas as pd
import pytest

from lab.analysis.charts import CHARTS, payload, speedup
from lab.analysis.sheet import NothingToDraw
from lab.draw.chart import drawn, spread
from tests.conftest import ROOT
from tests.support.svg import outside, overlapping

STRATEGIES = ("none", "allreduce", "tree", "overlap", "int8", "onebit", "topk", "powersgd")


def summary_of(
    strategies: tuple[str, ...] = STRATEGIES, batches: tuple[int, ...] = (32, 256, 1024)
) -> pd.DataFrame:
    """Return points of which all end close to each other."""
    rows = [
        {
            **{"series": name, "strategy": name, "scaling": "strong", "world_size": size},
            **{"fixed_batch_size": batch, "num_repeats": 5, "baseline": "none", "unit": "image"},
            **{"transform": "none", "emulation": "none", "leads": name == "onebit"},
            **_around("speedup", size**0.8 + 0.01 * place),
            **_around("efficiency", size**-0.2 + 0.001 * place),
            **_around("samples_per_s", 100 * size**0.8 + place),
            "payload_max_bytes": 1e8 / (1 + place) ** 2 if size > 1 and place else 0.0,
        }
        for place, name in enumerate(strategies)
        for batch in batches
        for size in (1, 2, 4, 8)
    ]
    return pd.DataFrame(rows)


def _around(name: str, value: float) -> dict[str, float]:
    return {f"{name}_lo": 0.95 * value, f"{name}_mid": value, f"{name}_hi": 1.05 * value}


@pytest.mark.parametrize("name", CHARTS)
@pytest.mark.parametrize("count", [2, len(STRATEGIES), 20])
def test_no_text_lies_on_another_or_leaves_the_picture(name: str, count: int) -> None:
    strategies = (*STRATEGIES, *(f"onebit bucket_mb={n}" for n in range(20)))[:count]
    svg = drawn(CHARTS[name](summary_of(strategies)).spec(), "svg").decode()
    assert overlapping(svg) == []
    assert outside(svg) == []


def test_texts_that_touch_are_found() -> None:
    chart = speedup(summary_of())
    crowded = drawn(chart.spec(), "svg").decode().replace('font-size="11px"', 'font-size="20px"')
    assert len(overlapping(crowded)) > 10


def test_panels_come_in_the_order_of_numbers() -> None:
    svg = drawn(speedup(summary_of(batches=(1024, 32, 256))).spec(), "svg").decode()
    places = [svg.index(f"global batch {batch}<") for batch in (32, 256, 1024)]
    assert places == sorted(places)


def test_the_title_is_the_message() -> None:
    summary = summary_of()
    assert speedup(summary).message.startswith("At most, with powersgd: ")  # not shown to lead
    summary["leads"] = summary["series"].isin(["powersgd"])
    assert speedup(summary).message == (
        "powersgd is fastest: 5.35 × one rank, on 8 ranks at global batch 32"
    )
    summary["leads"] = summary["series"].isin(["powersgd", "topk"])
    assert speedup(summary).message.startswith("powersgd, topk lead, not told apart: 5.35 × ")
    summary["num_repeats"] = 1
    chart = speedup(summary)
    assert chart.message.startswith("At most, with powersgd: 5.35 × ")
    assert "1 repeat a point: no intervals" in chart.about[0]
    assert payload(summary).message == "powersgd sends 16 times less than allreduce"


def test_a_chart_without_data_says_what_is_missing() -> None:
    summary = summary_of().assign(speedup_mid=math.nan, payload_max_bytes=0)
    with pytest.raises(NothingToDraw, match="no 1-rank run to measure speedup from"):
        speedup(summary)
    with pytest.raises(NothingToDraw, match="no finished run sent anything"):
        payload(summary)


def test_files_depend_on_the_data_alone(tmp_path: Path) -> None:
    summary = pd.read_csv(ROOT / "docs" / "results" / "demo" / "summary.csv")
    summary = summary.assign(fixed_batch_size=summary["batch_size"], leads=True)
    chart = speedup(summary)
    for kind in ("png", "svg"):
        (first,) = chart.write(tmp_path / "first", [kind])
        (again,) = chart.write(tmp_path / "again", [kind])
        assert first.read_bytes() == again.read_bytes()


@pytest.mark.parametrize("places", [[1.0, 1.0, 1.0], [0.0, 10.0], [3.0, 1.0, 1.1, 2.9], []])
def test_spread_places_keep_their_order_and_their_middle(places: list[float]) -> None:
    moved = spread(places, 0.5)
    ordered = [moved[at] for at in sorted(range(len(places)), key=lambda at: places[at])]
    assert all(b - a >= 0.5 - 1e-9 for a, b in zip(ordered, ordered[1:], strict=False))
    assert sum(moved) == pytest.approx(sum(places))
