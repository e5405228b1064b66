"""Fits beside the terms that GPUs have learned: what cells tell replaces them, the others stay."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lab import predict as command
from lab.model.profile import Profile
from lab.settings.files import read_file
from lab.simulate import view
from lab.simulate.costs import stages_of
from lab.simulate.fit import fit, fit_result
from lab.simulate.hardware import Hardware, parse, uncertainty_samples
from lab.simulate.network import Network
from lab.simulate.predict import predicted, read
from lab.simulate.score import Observation
from lab.simulate.step import simulate
from lab.simulate.terms import drawn, learned
from tests.support.commands import said
from tests.support.simulated import leave_study, strategy

PRESET = learned(parse(read_file("hardware", "h100x8_ndr")))
PROFILE = Profile.parse(read_file("profile", "alexnet_h100"))
SIZES = (2**18, 2**22, 2**26)


def result_of(folder: Path, hardware: Hardware, world_size: int) -> Path:
    """Leave a result of lab.bench collective, as the hardware would measure it."""
    network = Network(hardware, world_size)
    rows: list[dict[str, Any]] = [
        {
            "algorithm": name,
            "size_bytes": size,
            "time_s": {"median": sum(s.seconds for s in stages)},
        }
        for name in ("allreduce", "ring")
        for size in SIZES
        for stages in [stages_of([(size // 4,)], strategy(name).exchange, network)]
    ]
    path = folder / "collective.json"
    path.write_text(json.dumps({"bench": "collective", "world_size": world_size, "rows": rows}))
    return path


def keys_of(hardware: Hardware) -> Sequence[str]:
    assert hardware.learned
    return hardware.learned.keys


@pytest.mark.parametrize(("world_size", "way"), [(2, "intra"), (16, "inter")])
def test_collectives_give_the_link_that_they_used_and_leave_all_other_terms(
    tmp_path: Path, world_size: int, way: str
) -> None:
    link = getattr(PRESET, way)
    slower = replace(link, bandwidth_bytes_per_s=0.6 * link.bandwidth_bytes_per_s)
    found = fit_result(result_of(tmp_path, replace(PRESET, **{way: slower}), world_size), PRESET)
    rate = getattr(found, way).bandwidth_bytes_per_s
    assert rate == pytest.approx(slower.bandwidth_bytes_per_s, rel=0.02)
    gone = {"wire"} if way == "intra" else set[str]()  # which is of links inside a node
    assert {*keys_of(found)} == {*keys_of(PRESET)} - gone
    machines = [*drawn(uncertainty_samples(found))]
    assert {getattr(each, way).bandwidth_bytes_per_s for each in machines} == {rate}
    other = "inter" if way == "intra" else "intra"
    assert getattr(found, other) == getattr(PRESET, other)
    assert len({getattr(each, other).bandwidth_bytes_per_s for each in machines}) > 1


def test_the_command_keeps_learned_terms_beside_a_fit(tmp_path: Path) -> None:
    path = result_of(tmp_path, PRESET, 2)
    words = "strategy=overlap", "world_size=8", "hardware=h100x8_ndr", "profile=alexnet_h100"
    bare, fitted = (predicted(read(each))[0] for each in (words, (*words, f"fit={path}")))
    steps = [result["rows"][0]["step_s"] for result in (bare, fitted)]
    assert steps[1] == pytest.approx(steps[0], rel=0.01)  # it measured what was assumed
    text = view.table(fitted)
    assert "terms learned from published scaling (engage" in text
    assert f"fitted to {path}: latency_s=" in text and "contention=" not in text


def test_a_study_replaces_the_terms_of_which_two_ranks_tell(tmp_path: Path) -> None:
    true = replace(PRESET, engage=0.1, wire_passes=3.0, overhead_s=1e-4)
    names = ("none", "allreduce", "overlap", "ring")
    cells = [
        Observation(
            name,
            PROFILE,
            strategy(name),
            size,
            128,
            (simulate(PROFILE, true, way, size, 128).step_s,),
        )
        for name in names
        for way in [strategy(name)]
        for size in (1, 2)
    ]
    found, machines = fit(PRESET, cells)
    assert found.engage == pytest.approx(0.1, rel=0.05) and found.contention == 0.0
    assert {*keys_of(found)} == {*keys_of(PRESET)} - {"engage", "wire_passes", "wire"}
    assert found.jitter == PRESET.jitter and found.incast == PRESET.incast
    ahead = strategy("overlap")
    far = [simulate(PROFILE, each, ahead, 8, 128).step_s for each in (true, PRESET, found)]
    assert abs(far[2] / far[0] - 1) < 0.02 < abs(far[1] / far[0] - 1)
    assert len({each.jitter for each in drawn(machines)}) > 1

    leave_study(tmp_path / "study", PROFILE, names, true, sizes=(1, 2), batch_size=256)
    text = said(
        command.main,
        *("strategy=overlap", "world_size=8", "batch_size=256", "hardware=h100x8_ndr"),
        *("profile=alexnet_h100", f"fit={tmp_path}/study"),
    )
    assert "terms learned from published scaling (jitter" in text and "engage=0.099" in text
