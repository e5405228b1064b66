"""The command that measures layers."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from lab.model.profile import Profile
from tests.conftest import Finished

MODEL = ("model=mlp", "model.hidden=[40]", "data=synthetic", "data.shape=[1,4,4]", "device=cpu")


def test_measures_each_layer(command: Callable[..., Finished], tmp_path: Path) -> None:
    settings = (*MODEL, "batch_size=32", "steps=12", "out=mine.yaml")
    done = command("lab.profile_layers", *settings)
    assert done.code == 0, done.err
    profile = Profile.parse(OmegaConf.load(tmp_path / "mine.yaml"))  # type: ignore[arg-type]
    assert (profile.name, profile.reference_batch) == ("mine", 32)
    assert [(layer.name, layer.parameters) for layer in profile.layers] == [("1", 680), ("3", 410)]
    assert all(layer.forward_ms > 0 and layer.backward_ms > 0 for layer in profile.layers)
    assert profile.source.endswith(shlex.join(["lab.profile_layers", *settings[:-1]]))
    *_, total, _, _, _, step, fewer, _, wrote = done.out.splitlines()
    assert profile.step_ms and profile.rest_ms is not None and profile.num_threads
    parts_ms = 1e3 * profile.compute_s(32) + profile.rest_ms
    said = re.match(r"batch 32: step (\S+) ms without layer timers; ", step)
    assert said and float(said[1]) == pytest.approx(profile.step_ms, abs=1e-3)  # both are rounded
    by_lines = float(step.partition("the fitted lines give ")[2].split()[0])
    assert by_lines == pytest.approx(parts_ms, abs=2e-3)
    assert fewer.startswith("batch 8: step ")
    assert total.split()[:2] == ["all", "1,090"]
    whole_ms = sum(layer.forward_ms for layer in profile.layers)
    assert float(total.split()[2]) == pytest.approx(whole_ms, abs=2e-3)
    assert wrote == "wrote mine.yaml"


def test_fits_lines_through_a_list_of_batches(
    command: Callable[..., Finished], tmp_path: Path
) -> None:
    settings = (*MODEL, "batch_size=16,64,32", "steps=32", "out=mine.yaml")
    assert command("lab.profile_layers", *settings).code == 0
    profile = Profile.parse(OmegaConf.load(tmp_path / "mine.yaml"))  # type: ignore[arg-type]
    assert profile.reference_batch == 64 and len(profile.fits) == 2 * 2 + 2
    for fit in profile.fits:
        for times in (fit.fixed_ms, fit.per_sample_ms):
            low, median, high = (times[key] for key in ("low", "median", "high"))
            assert low is not None and median is not None and high is not None
            assert 0 <= low <= median <= high
    first = profile.fits[0]
    assert profile.layers[0].fixed_forward_ms == pytest.approx(first.fixed_ms["median"], abs=1e-4)
    words = ("strategy=none", "profile=mine.yaml", "world_size=1", "batch_size=24")
    predicted = command("lab.predict", *words, "hardware=this_machine", "out=mine.json")
    assert predicted.code == 0, predicted.err
    (row,) = json.loads((tmp_path / "mine.json").read_text())["rows"]
    low, high = row["step_s_interval"]
    assert low <= row["step_s"] <= high and low < high
