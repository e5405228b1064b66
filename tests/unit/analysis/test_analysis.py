"""Speedup, intervals and leaders, from synthetic studies whose times are known."""

from __future__ import annotations

import csv
import itertools
import math
from pathlib import Path
from typing import Any

import pytest

from lab.analysis import summary
from lab.analysis.points import Point, leaders, table
from lab.analysis.records import load_study
from lab.draw.chart import looks_of
from lab.record.schema import Emulation
from lab.settings.storage import write_json
from lab.web.elements import points_table
from tests.support.records import leave, make_record


def write_cell(study: Path, strategy: str, ranks: int, seconds: float | None, **more: Any) -> Path:
    """Write a run with a batch of 64, global or per rank by `scaling`; return its folder."""
    defaults: dict[str, Any] = {"num_parameters": 1000}
    if seconds is not None:
        defaults["payload_bytes_per_step"] = [100 * ranks] + [100] * (ranks - 1)
        defaults["final"] = {"loss": 0.5, "accuracy": 0.75}
    number = len(list(study.glob("*"))) if study.exists() else 0
    folder = study / f"{strategy}-{number:03d}"
    leave(folder, make_record(strategy, ranks, seconds, **(defaults | more)))
    return folder


def one(rows: list[Point], series: str, ranks: int) -> Point:
    return next(row for row in rows if (row.series, row.world_size) == (series, ranks))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "demo"


def test_weak_speedup_counts_the_larger_batch(folder: Path) -> None:
    write_cell(folder, "none", 1, 1.0, scaling="weak")
    write_cell(folder, "tree", 4, 2.0, scaling="weak")
    row = one(table(load_study(folder)), "tree", 4)
    assert (row.one.per_rank_batch_size, row.speedup.mid, row.efficiency.mid) == (64, 2.0, 0.5)


def test_a_strategy_that_needs_more_steps_has_the_baseline_of_the_others(folder: Path) -> None:
    for strategy, ranks, seconds, steps in (
        ("none", 1, 1.0, "40"), ("none", 2, 0.5, "40"), ("local_sgd", 2, 0.6, "400"),
        ("tree", 2, 0.8, "40"),
    ):  # fmt: skip
        write_cell(folder, strategy, ranks, seconds, variant={"steps": steps})
    row = one(table(load_study(folder)), "local_sgd", 2)
    assert row.speedup.mid == pytest.approx(1 / 0.6)
    assert row.exposed_exchange_s.mid == pytest.approx(0.1)
    for ranks, seconds in ((1, 2.0), (2, 0.3)):  # of as many steps, which share one setting more
        write_cell(folder, "none", ranks, seconds, variant={"steps": "400"})
    row = one(table(load_study(folder)), "local_sgd steps=400", 2)
    assert row.speedup.mid == pytest.approx(2 / 0.6)
    assert row.exposed_exchange_s.mid == pytest.approx(0.3)


def test_strong_and_weak_do_not_share_a_baseline(folder: Path) -> None:
    write_cell(folder, "none", 1, 1.0, scaling="strong")
    write_cell(folder, "tree", 4, 2.0, scaling="weak")
    assert math.isnan(one(table(load_study(folder)), "tree", 4).speedup.mid)


def test_pairing_by_repeat_removes_drift_that_both_share(folder: Path) -> None:
    for repeat, drift in enumerate((1.0, 1.3, 1.7, 2.2, 3.0, 4.0)):
        write_cell(folder, "none", 1, 1.0 * drift, repeat=repeat)
        write_cell(folder, "tree", 2, 0.5 * drift, repeat=repeat)
    speedup = one(table(load_study(folder)), "tree", 2).speedup
    assert [speedup.lo, speedup.mid, speedup.hi] == pytest.approx([2.0, 2.0, 2.0])


def test_only_repeats_that_both_have_are_paired(folder: Path) -> None:
    write_cell(folder, "none", 1, 9.0, repeat=0)
    write_cell(folder, "none", 1, 1.0, repeat=1)
    write_cell(folder, "tree", 2, 0.5, repeat=1)
    assert one(table(load_study(folder)), "tree", 2).speedup.mid == 2.0


def test_one_rank_exposes_no_exchange(folder: Path) -> None:
    for strategy, seconds in (("none", 1.0), ("tree", 1.2)):
        write_cell(folder, strategy, 1, seconds)
    assert math.isnan(one(table(load_study(folder)), "tree", 1).exposed_exchange_s.mid)


def test_breakdown_runs_feed_phases_and_never_speedup(folder: Path) -> None:
    write_cell(folder, "none", 1, 1.0)
    phases = {"data": 1.0, "forward": 2.0, "backward": 3.0, "exchange": 4.0, "update": None}
    write_cell(folder, "none", 1, 8.0, measure="breakdown", phases_s=phases)
    row = one(table(load_study(folder)), "none", 1)
    assert (row.step_s, row.num_repeats, len(row.done("breakdown"))) == (1.0, 1, 1)
    assert row.phases_s["backward"] == 3.0 and math.isnan(row.phases_s["update"])


def strategies_with_times(folder: Path, times: dict[str, list[float]]) -> list[Point]:
    for repeat in range(len(times["none"])):
        for strategy, seconds in times.items():
            ranks = 1 if strategy == "none" else 2
            write_cell(folder, strategy, ranks, seconds[repeat], repeat=repeat)
    return [row for row in table(load_study(folder)) if row.world_size == 2]


def test_overlapping_strategies_are_not_ranked(folder: Path) -> None:
    times = {
        "none": [1.0] * 6,
        "overlap": [0.50, 0.52, 0.54, 0.51, 0.53, 0.55],
        "ddp": [0.51, 0.53, 0.55, 0.50, 0.52, 0.54],
        "tree": [0.90, 0.92, 0.94, 0.91, 0.93, 0.95],
    }
    rows = strategies_with_times(folder, times)
    assert leaders(rows, math.nan) == ["overlap", "ddp"]
    text = summary.text(rows, load_study(folder))
    assert "N=2 strong batch 64: leaders, not significantly different: overlap, ddp" in text


def test_a_table_leaves_out_columns_rather_than_be_too_wide(folder: Path) -> None:
    long = {"optim.schedule": "a_schedule_with_a_long_name"}
    for repeat, ranks in itertools.product(range(3), (1, 2)):
        write_cell(folder, "none", ranks, 1 / ranks, repeat=repeat)
        for strategy in ("overlap", "onebit"):
            seconds = 0.1 + 1 / ranks + 0.01 * repeat
            write_cell(folder, strategy, ranks, seconds, repeat=repeat, variant=long)
    study = load_study(folder)
    text = summary.text(table(study), study)
    assert "left out, as the table would be too wide: efficiency" in text
    assert " step ms " in text and " speedup " in text
    assert all(len(line) <= summary.WIDTH for line in text.splitlines())


def test_single_repeats_are_not_ranked(folder: Path) -> None:
    rows = strategies_with_times(folder, {"none": [1.0], "overlap": [0.5], "tree": [0.9]})
    assert leaders(rows, math.nan) == ["tree", "overlap"]


def test_repeats_of_the_ceiling_alone_rank_nobody(folder: Path) -> None:
    for repeat in range(3):
        write_cell(folder, "none", 2, 0.1 + 0.01 * repeat, repeat=repeat)
    for strategy in ("tree", "overlap"):
        write_cell(folder, strategy, 2, 0.5)
    study = load_study(folder)
    assert "leader" not in summary.text(table(study), study)
    assert "fastest" not in points_table(table(study), math.nan, "points").header


def test_the_ceiling_is_no_leader(folder: Path) -> None:
    write_cell(folder, "none", 1, 1.0)
    write_cell(folder, "none", 2, 0.5)
    assert leaders(table(load_study(folder)), math.nan) == []


def test_without_none_each_series_is_its_own_baseline(folder: Path) -> None:
    for strategy, ranks, seconds in (("tree", 1, 1.0), ("tree", 2, 0.8), ("ring", 2, 0.5)):
        write_cell(folder, strategy, ranks, seconds)
    rows = table(load_study(folder))
    assert (one(rows, "tree", 2).speedup.mid, one(rows, "tree", 2).baseline) == (1.25, "tree")
    assert math.isnan(one(rows, "ring", 2).speedup.mid)


def test_a_named_baseline_is_used_and_an_absent_one_refused(folder: Path) -> None:
    for strategy, ranks, seconds in (("none", 1, 1.0), ("tree", 1, 2.0), ("tree", 2, 1.0)):
        write_cell(folder, strategy, ranks, seconds)
    study = load_study(folder)
    assert one(table(study, "tree"), "tree", 2).speedup.mid == 2.0
    with pytest.raises(ValueError, match=r"baseline=ring.*allowed: none, tree"):
        table(study, "ring")


def test_settings_that_vary_name_series_and_find_their_own_baseline(folder: Path) -> None:
    for model, seconds in (("AlexNet", 1.0), ("VGG", 4.0)):
        write_cell(folder, "none", 1, seconds, model=model)
        for size in ("4", "25"):
            variant = {"bucket_mb": size, "steps": "20"}
            write_cell(folder, "onebit", 2, seconds / 2, model=model, variant=variant)
    rows = table(load_study(folder))
    mine = [row for row in rows if row.strategy == "onebit"]
    assert [row.series for row in mine] == [
        f"onebit model={model} bucket_mb={size}"  # steps follow from the strategy here
        for model in ("AlexNet", "VGG")
        for size in ("4", "25")
    ]
    assert [row.speedup.mid for row in mine] == [2.0] * 4


def test_a_transform_is_measured_against_its_own_model(folder: Path) -> None:
    write_cell(folder, "none", 1, 1.0)
    write_cell(folder, "none", 2, 0.5)
    write_cell(folder, "fc1x1", 1, 0.6, transform="FCToConv")
    write_cell(folder, "fc1x1", 2, 0.4, transform="FCToConv")
    row = one(table(load_study(folder)), "fc1x1", 2)
    assert row.speedup.mid == pytest.approx(1.5) and row.baseline == "fc1x1"
    assert math.isnan(row.exposed_exchange_s.mid)
    variant = {"transform": "fc1x1"}
    write_cell(folder, "none", 2, 0.3, transform="FCToConv", variant=variant)
    row = one(table(load_study(folder)), "fc1x1", 2)
    assert row.exposed_exchange_s.mid == pytest.approx(0.1)


def test_failed_and_missing_cells_are_named_and_the_rest_survives(folder: Path) -> None:
    write_cell(folder, "tree", 2, None, status="oom", error="rank 1: out of memory")
    write_cell(folder, "none", 1, 1.0, environment={"cpu": "a processor"})
    write_cell(folder, "tree", 2, 0.5, repeat=0, environment={"cpu": "a processor"})
    lost = write_cell(folder, "ring", 2, None, status="timeout") / "record.json"
    nothing = {"schema": 1, "strategy": "ring", "world_size": None, "variant": None}
    write_json(lost, {**nothing, "status": "timeout"})
    (folder / "killed").mkdir()
    study = load_study(folder)
    rows = table(study)
    assert [row.series for row in rows] == ["none", "tree"]
    assert rows[1].statuses["oom"] == 1 and rows[1].speedup.mid == 2.0
    text = summary.text(rows, study)
    assert "oom: tree-000: rank 1: out of memory" in text
    assert "timeout: ring-003: no error was recorded" in text
    assert "missing: killed: left no record.json" in text


def test_a_point_where_every_run_failed_keeps_its_row(folder: Path) -> None:
    write_cell(folder, "tree", 2, None, error="rank 0: ValueError: no")
    study = load_study(folder)
    (row,) = table(study)
    assert row.num_repeats == 0 and math.isnan(row.step_s) and row.statuses["failed"] == 1
    assert "1 failed" in summary.text([row], study)


def test_a_record_that_is_no_object_is_refused(folder: Path) -> None:
    write_cell(folder, "none", 1, 1.0)
    record = folder / "none-000" / "record.json"
    for text, message in (("{", "not JSON"), ("[]", "contains a value of type list")):
        record.write_text(text)
        with pytest.raises(ValueError, match=message):
            load_study(folder)


def test_csv_holds_every_number(folder: Path) -> None:
    write_cell(folder, "none", 1, 1.0)
    write_cell(folder, "tree", 2, 0.5, emulation=[Emulation("shared_gpus", "2 ranks share 1 GPUs")])
    summary.write_csv(table(load_study(folder)), folder / "summary.csv")
    with (folder / "summary.csv").open(newline="") as file:
        none, tree = csv.DictReader(file)
    assert (none["series"], none["emulation"], none["transform"]) == ("none", "none", "none")
    assert tree["emulation"] == "2 ranks share 1 GPUs"
    numbers = ("step_s", "speedup_mid", "efficiency_mid", "samples_per_s_mid", "accuracy")
    assert [float(tree[name]) for name in numbers] == pytest.approx([0.5, 2.0, 1.0, 128.0, 0.75])
    assert (tree["speedup_lo"], tree["speedup_hi"]) == ("", "")
    assert (float(tree["payload_max_bytes"]), float(tree["payload_min_bytes"])) == (200, 100)
    assert (tree["num_done"], tree["num_oom"], tree["baseline"]) == ("1", "0", "none")


def test_looks_are_fixed_by_strategy_and_all_differ() -> None:
    many = [f"onebit bucket_mb={size}" for size in range(8)] + ["none", "mine", "overlap"]
    given = looks_of(many)
    assert given["none"] == looks_of(["none", "ddp"])["none"]
    assert given["onebit bucket_mb=0"] == looks_of(["onebit"])["onebit"]
    assert len({(look.colour, look.line) for look in given.values()}) == len(many)
    assert list(given)[:3] == ["none", "overlap", "onebit bucket_mb=0"]


def test_a_seed_counts_once_in_a_mean_also_if_a_breakdown_repeats_it(tmp_path: Path) -> None:
    for name, repeat, measure, accuracy in (
        ("a", 0, "throughput", 0.9),
        ("b", 1, "throughput", 0.8),
        ("c", 0, "breakdown", 0.9),
        ("d", 2, "breakdown", 0.7),
    ):
        about = {"repeat": repeat, "measure": measure, "final": {"accuracy": accuracy}}
        leave(tmp_path / name, make_record("tree", 2, 0.5, **about))
    (point,) = table(load_study(tmp_path))
    assert point.final == {"accuracy": pytest.approx(0.8)}


@pytest.mark.parametrize(
    ("final", "heading", "value"),
    [
        ({"loss": 0.5, "accuracy": 0.9694}, "accuracy %", "96.94"),
        ({"loss": 0.25, "mae": 0.125}, "mae", "0.125"),
        ({"loss": 3.5}, "loss", "3.5"),
    ],
)
def test_a_metric_has_a_column(
    tmp_path: Path, final: dict[str, float], heading: str, value: str
) -> None:
    leave(tmp_path / "one", make_record("none", 1, 0.5, final=final))
    leave(tmp_path / "two", make_record("none", 2, 0.25, final={**final, "loss": 3.5}))
    study = load_study(tmp_path)
    rows = table(study)
    assert [row.final.keys() for row in rows] == [final.keys()] * 2
    text = summary.text(rows, study)
    assert heading in text and value in text
    summary.write_csv(rows, tmp_path / "summary.csv")
    assert set(final) <= set((tmp_path / "summary.csv").read_text().splitlines()[0].split(","))
