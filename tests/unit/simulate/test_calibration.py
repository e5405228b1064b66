"""Hardware that was measured: fitted values, intervals, and predictions of larger numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from lab.benchmarks.calibrate import groups_of
from lab.settings.config import load
from lab.settings.files import read_file
from lab.simulate.calibration import (
    SEND_RECV,
    CalibratedRanks,
    base_of,
    hardware_of,
    observation,
    predicted_rows,
    predicted_steps,
    put_overhead,
    refine,
    scored,
    waiting,
)
from lab.simulate.fit import collective_s, with_values
from lab.simulate.hardware import Hardware, parse
from lab.simulate.network import Network
from lab.simulate.predict import plain, read
from lab.simulate.score import Observation
from lab.simulate.terms import published

EXCHANGES: dict[str, Any] = {
    name: read_file("exchange", name) for name in ("allreduce", "ring", "onebit")
}
TRUE = {"inter.latency_s": 2e-4, "inter.bandwidth_bytes_per_s": 4e7, "reduce_bytes_per_s": 5e8}
VALUES = {
    "contention": {"median": 0.1, "low": 0.05, "high": 0.2},
    "jitter": {"median": 0.01, "low": 0.008, "high": 0.012},
    "codec_bytes_per_s": {"median": 5e9, "low": 4e9, "high": 6e9},
}
STEPS = [
    "model=replay",
    "profile=alexnet_titanx",
    "data=synthetic",
    "batch_size=32",
    "scaling=weak",
]


@pytest.fixture(scope="module")
def truth() -> Hardware:
    preset = parse(base_of("gloo", emulated=True))
    keys = [*TRUE, "codec_rates.OneBit", "codec_s"]
    return with_values(preset, keys, [*TRUE.values(), 2e9, 1e-4])


def measured(truth: Hardware, ranks: int) -> CalibratedRanks:
    """Return rows as they would be measured on such hardware."""
    rows: list[dict[str, Any]] = []
    for size in (2**12, 2**15, 2**18, 2**21, 2**24):
        for name in (*EXCHANGES, SEND_RECV):
            row: dict[str, Any] = {"algorithm": name, "size_bytes": size, "shape": [size // 4]}
            seconds = collective_s(row, EXCHANGES.get(name), Network(truth, ranks))
            rows.append({**row, "time_s": {"median": seconds}})
    return CalibratedRanks("inter", ranks, rows)


def steps_on(hardware: Hardware, ranks: int) -> list[Observation]:
    """Return steps as they would be measured on such hardware: without exchange, and with one."""
    found: list[Observation] = []
    for name in ("none", "allreduce"):
        settings = plain(load([*STEPS, f"exchange={name}", "model.bytes_scale=0.01"]))
        steps = observation(name, ranks, settings, (1.0,))
        found.append(replace(steps, steps_s=(steps.predicted_s(hardware),)))
    return found


def test_what_two_ranks_measure_gives_the_hardware_and_predicts_more(
    truth: Hardware, tmp_path: Path
) -> None:
    places = [measured(truth, ranks) for ranks in (2, 4)]
    base = base_of("gloo", emulated=True)
    about = {"name": "calibrated", "ranks_per_node": 1}
    node = hardware_of(base, about, VALUES, places, EXCHANGES)
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(node, sort_keys=False))
    found = read([f"hardware={path}", "world_size=4"]).hardware
    assert found.inter and truth.inter
    assert found.inter.bandwidth_bytes_per_s == pytest.approx(4e7, rel=0.02)
    assert found.inter.latency_s == pytest.approx(2e-4, rel=0.05)
    assert found.codec_rate("OneBit") == pytest.approx(2e9, rel=0.1)
    assert found.contention == 0.1 and found.intra is None
    assert found.residual == published().residual
    ends = {each.key: (each.low, each.high) for each in found.assumed}
    assert ends["contention"] == (0.05, 0.2)
    low, high = ends["codec_rates.OneBit"]
    assert low <= found.codec_rate("OneBit") <= high and low < high
    assert not any(key.startswith("intra") for key in ends)
    errors = [abs(row["error"]) for row in predicted_rows(places, EXCHANGES, found)]
    assert len(errors) == 30 and max(errors) < 0.05


def test_steps_of_more_ranks_are_scored_and_counted_inside_their_intervals(truth: Hardware) -> None:
    steps = [*steps_on(waiting(truth), 2), *steps_on(waiting(truth), 4)]
    rows = predicted_steps(steps, truth)
    of_more = scored(rows, held=True, least_exposed=0.02)
    assert of_more["num_cells"] == 1  # `none` has nothing to predict
    assert of_more["step"] == pytest.approx((0, 0)) and of_more["exposed"] == pytest.approx((0, 0))
    assert of_more["skill"] == pytest.approx(1)
    assert of_more["coverage"] == {"95": 1, "80": 1}
    slower = [replace(one, steps_s=(9.0,)) for one in steps]
    missed = scored(predicted_steps(slower, truth), held=True, least_exposed=0.02)
    assert missed["coverage"] == {"95": 0, "80": 0} and missed["step"][0] > 0.5


def test_intervals_hold_what_the_model_misses_where_all_values_are_known(truth: Hardware) -> None:
    known = replace(truth, assumed=())
    slower = [replace(one, steps_s=(1.03 * one.step_s,)) for one in steps_on(waiting(truth), 4)]
    for residual, share in ((None, 0), (published().residual, 1)):
        rows = predicted_steps(slower, replace(known, residual=residual))
        found = scored(rows, held=True, least_exposed=0.02)
        assert found["coverage"] == {"95": share, "80": share}


def test_pairs_are_fitted_to_and_the_largest_groups_held_out() -> None:
    assert groups_of([[0, 1]]) == [("intra", [0, 1])]
    assert groups_of([[0], [1], [2], [3]]) == [
        ("inter", [0, 1]),
        ("inter", [0, 1, 2]),
        ("inter", [0, 1, 2, 3]),
    ]
    first, second, *larger = groups_of([[0, 1, 2, 3], [4, 5, 6, 7]])
    assert (first, second) == (("intra", [0, 1]), ("inter", [0, 4]))
    assert [(link, len(members)) for link, members in larger] == [("inter", 6), ("inter", 8)]


def test_steps_of_two_ranks_correct_what_their_collectives_told(truth: Hardware) -> None:
    base = base_of("gloo", emulated=True)
    about = {"name": "calibrated", "ranks_per_node": 1}
    node = hardware_of(base, about, VALUES, [measured(truth, 2)], EXCHANGES)
    low, high = node["assumed"]["inter.bandwidth_bytes_per_s"]
    node["crowding"] = 0.0  # as idle cores may show; a fit must begin somewhere all the same
    slower = with_values(truth, ["inter.bandwidth_bytes_per_s"], [2e7])
    steps = steps_on(waiting(slower), 2)
    put_overhead(node, steps[0])
    refine(node, steps, "inter")
    assert node["inter"]["bandwidth_bytes_per_s"] == pytest.approx(2e7, rel=0.1)
    lower, higher = node["assumed"]["inter.bandwidth_bytes_per_s"]
    assert higher / lower == pytest.approx(high / low, rel=0.01)
