"""Charts of a study: their message, and no text on another one or outside of the picture."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import pandas as pd
import pytest

from lab.analysis.charts import CHARTS, NothingToDraw
from lab.draw.chart import DASHES, LOOKS, WIDTH, Chart, drawn, looks_of, pixels_of, spread
from lab.draw.plots import bars
from lab.measure import PHASES
from tests.conftest import ROOT
from tests.support.cases import ALL_STRATEGIES
from tests.support.slow import some_of
from tests.support.svg import outside, overlapping

STRATEGIES = ("none", "allreduce", "tree", "overlap", "int8", "onebit", "topk", "powersgd")


def summary_of(
    strategies: tuple[str, ...] = STRATEGIES, batches: tuple[int, ...] = (32, 256, 1024)
) -> pd.DataFrame:
    """Return points of which all end close to each other."""
    rows = [
        {
            **{"series": name, "strategy": name, "label": name, "usual": ""},
            **{"scaling": "strong", "world_size": size},
            **{"fixed_batch_size": batch, "num_repeats": 5, "baseline": "none", "unit": "image"},
            **{"transform": "none", "emulation": "none", "leads": name == "onebit", "one_rank": ""},
            **{"metric": "accuracy", "accuracy": 0.9, "data": "digits", "num_parameters": 1e6},
            **{"prediction": "prediction", "predictions_per_sample": 1, "step_s": batch / size},
            **_around("speedup", size**0.8 + 0.01 * place),
            **_around("efficiency", size**-0.2 + 0.001 * place),
            **_around("exposed_exchange_s", 0.01 * place if size > 1 else math.nan),
            **_around("samples_per_s", 100 * size**0.8 + place),
            "payload_max_bytes": 1e8 / (1 + place) ** 2 if size > 1 and place else 0.0,
            "payload_min_bytes": 0.0,
        }
        for place, name in enumerate(strategies)
        for batch in batches
        for size in (1, 2, 4, 8)
    ]
    return pd.DataFrame(rows)


def chart(name: str, summary: pd.DataFrame, width: int = WIDTH) -> Chart:
    return CHARTS[name](summary, looks_of(summary["series"]), width)


def _around(name: str, value: float) -> dict[str, float]:
    return {f"{name}_lo": 0.95 * value, f"{name}_mid": value, f"{name}_hi": 1.05 * value}


# A chart of scaling is those of speedup and efficiency together.
@pytest.mark.parametrize("name", some_of(CHARTS, also={*CHARTS} - {"speedup", "efficiency"}))
@pytest.mark.parametrize(
    ("count", "width"), some_of([(4, pixels_of(3.3)), (8, WIDTH), (20, 1250)], every=2)
)
def test_no_text_lies_on_another_or_leaves_the_picture(name: str, count: int, width: int) -> None:
    strategies = (*STRATEGIES, *(f"onebit bucket_mb={n}" for n in range(20)))[:count]
    svg = drawn(chart(name, summary_of(strategies), width).spec(), "svg").decode()
    assert overlapping(svg) == []
    assert outside(svg) == []
    assert 0.8 * width < float(svg.partition('width="')[2].partition('"')[0]) < 1.1 * width


def test_every_strategy_has_a_look_of_its_own_which_charts_draw() -> None:
    names = tuple(sorted(ALL_STRATEGIES))
    svg = drawn(chart("speedup", summary_of(names, (32,))).spec(), "svg").decode()
    for name in names:
        look = LOOKS[name]
        dashes = ",".join(f"{part:g}" for part in DASHES[look.line])
        assert f'stroke="{look.colour}" stroke-width="1.8" stroke-dasharray="{dashes}"' in svg
    assert len({(look.colour, look.line) for look in LOOKS.values()}) == len(LOOKS)


def test_a_paper_has_its_width_to_the_point(tmp_path: Path) -> None:
    summary = summary_of(("none", "tree"), batches=(1024, 32, 256))
    made = chart("scaling", summary, pixels_of(3.3))
    made.write(tmp_path / "a", ["svg", "pdf", "png"], width_in=3.3, title=False)
    svg = (tmp_path / "a.svg").read_text()
    assert ' width="237.6pt" ' in svg and made.message not in svg
    assert b"[0 0 237.6 " in (tmp_path / "a.pdf").read_bytes()
    width, _ = struct.unpack(">II", (tmp_path / "a.png").read_bytes()[16:24])
    assert width == 990
    places = [svg.index(f"global batch {batch}<") for batch in (32, 256, 1024)]
    assert places == sorted(places)  # below each other, in the order of numbers
    assert made.caption.startswith(f"{made.message}. Speedup over none on 1 rank, strong scaling.")


def test_texts_that_touch_are_found() -> None:
    made = chart("speedup", summary_of())
    crowded = drawn(made.spec(), "svg").decode().replace('font-size="11px"', 'font-size="20px"')
    assert len(overlapping(crowded)) > 10


def test_an_interval_of_a_step_ends_at_zero_and_the_title_says_that_it_may_be_noise() -> None:
    summary = summary_of(("none", "onebit"), (32,))
    shown = summary["exposed_exchange_s_mid"]
    summary = summary.assign(step_s=0.02, exposed_exchange_s_lo=shown - 1)
    drawing = chart("step_time", summary)
    assert "is not significantly above 0" in drawing.message
    (data,) = drawing.spec()["datasets"].values()
    ends = [row["low"] for row in data if row["low"] is not None]
    assert ends and min(ends) == 0


def test_payload_on_one_number_of_ranks_is_a_bar_for_each_series_with_its_value() -> None:
    summary = summary_of(("none", "allreduce", "onebit"), (32,))
    drawing = chart("payload", summary.query("world_size <= 2"))
    svg = drawn(drawing.spec(), "svg").decode()
    assert ">25 MB<" in svg and ">11.1 MB<" in svg and "a ring in fp32" in svg
    assert overlapping(svg) == [] and outside(svg) == []
    assert "Dotted" not in drawing.caption


@pytest.mark.parametrize(
    ("ends", "message"),
    [
        (
            (0.9, 1.1),
            "With onebit, 8 ranks are not significantly faster than one: 1.00 [0.90, 1.10] ×",
        ),
        ((0.8, 0.9), "With onebit, 8 ranks are slower than one: 0.85 [0.80, 0.90] ×"),
        ((1.2, 1.4), "Highest speedup with onebit: 1.30 × one rank"),
    ],
)
def test_a_title_says_whether_ranks_gain_anything(ends: tuple[float, float], message: str) -> None:
    summary = summary_of(("none", "onebit"), (32,))
    low, high = ends
    changed = summary.assign(speedup_lo=low, speedup_mid=(low + high) / 2, speedup_hi=high)
    assert chart("speedup", changed).message.startswith(message)


def test_on_one_rank_there_is_no_speedup_to_draw() -> None:
    with pytest.raises(NothingToDraw, match="only one rank was measured"):
        chart("scaling", summary_of().query("world_size == 1"))


def test_a_range_of_one_series_is_one_of_batches() -> None:
    summary = summary_of(("none", "onebit"))
    summary["exposed_exchange_s_mid"] = 0.1 * (summary["fixed_batch_size"] == 32)
    message = chart("step_time", summary.query("exposed_exchange_s_lo != 0")).message
    assert "(global batch 256) to" in message and "(onebit)" not in message


def test_a_text_stands_at_its_bar_and_gives_way_to_a_mark() -> None:
    data = pd.DataFrame({"name": ["near", "far"], "part": "sent", "value": [1.0, 1.0]})
    data["text"], data["mark"] = "1 MB", [1.05, 9.0]
    body, _ = bars(data, "MB", {"sent": "#0072B2"}, marks="a ring")
    (made,) = Chart("payload", "message", [], body, 400).spec()["datasets"].values()
    assert [row["behind"] for row in made] == [1.05, 1.0]


def test_the_title_is_the_message() -> None:
    summary = summary_of()
    assert chart("speedup", summary).message.startswith("onebit is fastest: ")  # alone it leads
    summary["leads"] = False
    assert chart("speedup", summary).message.startswith("Highest speedup with powersgd: ")
    summary["leads"] = summary["series"].isin(["powersgd"])
    assert chart("speedup", summary).message == (
        "powersgd is fastest: 5.35 × one rank, on 8 ranks at global batch 32"
    )
    summary["leads"] = summary["series"].isin(["powersgd", "topk"])
    message = chart("speedup", summary).message
    leaders = "powersgd and topk are fastest, with no significant difference: 5.35 × "
    assert message.startswith(leaders)
    summary["num_repeats"] = 1
    made = chart("speedup", summary)
    assert made.message.startswith("Highest speedup with powersgd: 5.35 × ")
    assert "1 repeat per point, so no intervals" in made.about[0]
    sent = "A rank sends 16 times as many bytes with allreduce as with powersgd"
    assert chart("payload", summary).message == sent


def test_titles_write_large_and_small_numbers_in_full() -> None:
    summary = summary_of(("none", "allreduce"), (32,))
    large = summary.assign(payload_max_bytes=1e3 * summary["payload_max_bytes"])
    assert chart("payload", large).message == "A rank sends 25000 MB per step with allreduce"
    slow = {f"samples_per_s_{end}": 1e-3 * summary[f"samples_per_s_{end}"] for end in ("lo", "mid")}
    message = chart("throughput", summary.assign(**slow, leads=True)).message
    assert message == "With allreduce, 8 ranks train 0.529 images per second"


def test_the_most_ranks_whose_exposed_exchange_is_known_are_told() -> None:
    summary = summary_of(("none", "onebit"), (32,)).query("strategy != 'none' or world_size < 8")
    unknown = summary["world_size"] == 8
    summary["exposed_exchange_s_mid"] = summary["exposed_exchange_s_mid"].mask(unknown)
    assert chart("step_time", summary).message.startswith("On 4 ranks, exposed exchange is ")
    alone = summary.query("strategy != 'none' or world_size == 1")
    alone = alone.assign(exposed_exchange_s_mid=math.nan)
    assert chart("step_time", alone).message == "The exposed exchange of these steps is not known"


def test_breakdowns_per_point_are_told_as_a_range() -> None:
    points = summary_of(("none", "onebit", "tree"), (32,)).query("world_size == 2")
    points = points.assign(**{f"{name}_s": 0.01 for name in PHASES}, num_breakdowns=[1, 2, 5])
    assert "Medians of 1 to 5 breakdown runs per point" in chart("step_time", points).about[0]


def test_a_chart_without_data_says_what_is_missing() -> None:
    summary = summary_of().assign(speedup_mid=math.nan, payload_max_bytes=0)
    with pytest.raises(NothingToDraw, match="no 1-rank run to measure speedup from"):
        chart("speedup", summary)
    with pytest.raises(NothingToDraw, match="no finished run sent anything"):
        chart("payload", summary)


def test_files_depend_on_the_data_alone(tmp_path: Path) -> None:
    summary = pd.read_csv(ROOT / "docs" / "results" / "demo" / "summary.csv")
    summary = summary.assign(
        fixed_batch_size=summary["batch_size"],
        leads=True,
        one_rank="",
        label=summary["series"],
        usual="",
    )
    made = chart("speedup", summary)
    for kind in ("png", "svg"):
        (first,) = made.write(tmp_path / "first", [kind])
        (again,) = made.write(tmp_path / "again", [kind])
        assert first.read_bytes() == again.read_bytes()


@pytest.mark.parametrize("places", [[1.0, 1.0, 1.0], [0.0, 10.0], [3.0, 1.0, 1.1, 2.9], []])
def test_spread_places_keep_their_order_and_their_middle(places: list[float]) -> None:
    moved = spread(places, 0.5)
    ordered = [moved[at] for at in sorted(range(len(places)), key=lambda at: places[at])]
    assert all(b - a >= 0.5 - 1e-9 for a, b in zip(ordered, ordered[1:], strict=False))
    assert sum(moved) == pytest.approx(sum(places))
