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
from lab.simulate.hardware import Hardware, Link, parse, uncertainty_samples
from lab.simulate.network import Network
from lab.simulate.predict import predicted, read
from lab.simulate.score import Group, Observation
from lab.simulate.step import simulate
from lab.simulate.terms import drawn, learned
from tests.support.commands import said
from tests.support.simulated import TRUE, leave_study, strategy

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


def test_what_another_fit_tells_is_kept_beside_few_cells() -> None:
    """Ranks of a host tell the link inside; one of their steps is a fifth too long by accident."""
    profile = replace(Profile.parse(read_file("profile", "alexnet_titanx")), bytes_scale=0.02)
    one_a_host = replace(TRUE, codec_s=1e-4)
    two_a_host = replace(one_a_host, ranks_per_node=2, intra=Link(3e-4, 5e8))

    def step_s(name: str, hardware: Hardware, size: int) -> float:
        return simulate(profile, hardware, strategy(name), size, 64).step_s

    def cells(hardware: Hardware, errors: dict[tuple[str, int], float]) -> list[Observation]:
        return [
            Observation(
                name, profile, strategy(name), size, 64, (by * step_s(name, hardware, size),)
            )
            for (name, size), by in errors.items()
        ]

    apart = {("none", 1): 1.0, ("none", 2): 1.01, ("allreduce", 2): 0.99, ("overlap", 2): 1.0}
    many = cells(one_a_host, {**apart, ("onebit", 2): 1.01, ("int8", 2): 0.99})
    before = Group("one", tuple(many), *fit(TRUE, many))
    preset = replace(before.hardware, ranks_per_node=2, intra=Link(1e-4, 1e9))
    names = {("none", 2): 1.0, ("hierarchical", 2): 1.0, ("hierarchical_onebit", 2): 1.2}
    few = cells(two_a_host, names)
    true_s = step_s("hierarchical_onebit", two_a_host, 4)
    errors = [
        abs(step_s("hierarchical_onebit", fit(preset, few, before=known)[0], 4) / true_s - 1)
        for known in (before, None)
    ]
    assert errors[0] < 0.02 < errors[1]
