"""The command that measures layers."""

from __future__ import annotations

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
    *_, total, _, step, wrote = done.out.splitlines()
    assert profile.step_ms and profile.rest_ms is not None and profile.num_threads
    parts_ms = 1e3 * profile.compute_s(32) + profile.rest_ms
    # Medians of parts need not add up to the median of the whole.
    assert parts_ms == pytest.approx(profile.step_ms, rel=0.2)
    assert step.startswith(f"step {profile.step_ms:.3f} ms without clocks on its layers")
    assert total.split()[:2] == ["all", "1,090"]
    whole_ms = sum(layer.forward_ms for layer in profile.layers)
    assert float(total.split()[2]) == pytest.approx(whole_ms, abs=2e-3)
    assert wrote == "wrote mine.yaml"
