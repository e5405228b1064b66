"""The figure of predictions."""

from __future__ import annotations

from typing import Any

from lab.simulate import view
from lab.simulate.view import MOST_DRAWN, chart, open_values
from tests.support.cases import ALL_STRATEGIES


def result_of(names: list[str]) -> dict[str, Any]:
    """Return a result in which each strategy is faster than the ones before it."""
    rows = [
        {
            **{"series": name, "strategy": name, "world_size": size, "scaling": "strong"},
            **{"batch_size": 64, "per_rank_batch_size": 64 // size, "step_s": 1.0},
            "speedup": 1 + (size - 1) * (1 + place) / len(names),
            "speedup_interval": (0.5, 4.0),
        }
        for place, name in enumerate(names)
        for size in (1, 4)
    ]
    hardware = [{"name": "eth10g"}]
    return {"rows": rows, "profiles": {"vgg": 1}, "hardware": hardware, "fit": None}


def test_a_figure_draws_the_leaders_and_counts_the_others() -> None:
    drawing = chart(result_of(ALL_STRATEGIES))
    assert " on 4 ranks with " in drawing.message
    alone = result_of(["tree"])
    alone["rows"] = alone["rows"][:1]
    assert "on 1 rank with tree at global batch 64" in chart(alone).message
    (data,) = drawing.spec()["datasets"].values()
    assert {row["series"] for row in data} == {*ALL_STRATEGIES[-MOST_DRAWN:]}
    assert drawing.about == [
        "dotted: ideal; hollow: predicted, vgg on eth10g; vertical: 95 % intervals",
        f"slower series left out: {len(ALL_STRATEGIES) - MOST_DRAWN}",
    ]


def test_a_figure_of_a_few_series_leaves_none_out() -> None:
    assert len(chart(result_of(ALL_STRATEGIES[:MOST_DRAWN])).about) == 1


def test_what_makes_intervals_names_the_cost_model_where_it_has_a_residual() -> None:
    result: dict[str, Any] = {"rows": [{"basis": "profile"}], "fit": None, "open_profiles": []}
    measured: dict[str, Any] = {"assumed": [{"key": "jitter"}], "learned": None}
    assert open_values(result, [measured]) == ["jitter"]
    assert open_values(result, [{**measured, "residual": 0.03}]) == ["the cost model", "jitter"]


def test_only_predictions_whose_interval_holds_linear_scaling_are_no_better_than_it() -> None:
    result = result_of(["tree", "overlap"])
    ends = [(0.9, 1.1), (1.5, 3.0), (0.9, 1.1), (3.5, 4.2)]  # on 1 and 4 ranks
    for row, interval in zip(result["rows"], ends, strict=True):
        if row["world_size"] > 1:
            row["speedup_interval_80"] = interval
    (line,) = view._linear(result)
    assert "the 80 % interval of 1 of 2 predictions, at N = 4, which are no better" in line
    result["rows"][1]["speedup_interval_80"] = result["rows"][3]["speedup_interval_80"] = (4.1, 5)
    assert "is outside all 80 % intervals" in view._linear(result)[0]
