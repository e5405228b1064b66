"""A short part of the attacks: `make attack` has all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lab.problem import output_shapes
from lab.settings.errors import ConfigError
from lab.task.tasks import Classification
from tests.attack import kills, numbers, odd, planted, strangers
from tests.attack.outcome import BAD, REFUSED
from tests.attack.readers import READERS, attack
from tests.support.slow import some_of


@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_is_read_or_refused_in_a_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    attempts = list(attack(name, seed=1, count=4, limit=False))
    assert [attempt for attempt in attempts if attempt.outcome in BAD] == []
    assert len({attempt.what for attempt in attempts}) == 4


@pytest.mark.slow
def test_a_killed_run_ends_as_an_undisturbed_one(tmp_path: Path) -> None:
    attempts = list(kills.attack(3, 2, tmp_path, ("torchrun",)))
    assert [attempt for attempt in attempts if attempt.outcome in BAD] == []


@pytest.mark.parametrize("part", ["training", "test"])
def test_data_without_samples_are_refused(part: str) -> None:
    data = odd.data(seed=0, device=torch.device("cpu"), kind=f"no {part} samples")
    with pytest.raises(ConfigError, match=f"^data has no {part} samples$"):
        output_shapes(Classification(), data)


@pytest.mark.slow
def test_a_run_with_a_label_too_high_is_refused(tmp_path: Path) -> None:
    kind = "a label too high"
    attempt = numbers.tried(kind, kind, "onebit", numbers.of_data(kind), tmp_path)
    assert attempt.outcome == REFUSED
    assert "from 0 to 10" in attempt.said


@pytest.mark.slow
def test_no_planted_secret_is_shown(tmp_path: Path) -> None:
    attempts = list(planted.attack(0, 1, tmp_path))
    assert len(attempts) == 40
    assert [attempt for attempt in attempts if attempt.outcome in BAD] == []


@pytest.mark.parametrize("every", some_of([1, 12], also=[12]))
@pytest.mark.parametrize("name", READERS)
def test_a_strangers_file_is_read_or_refused_in_a_line(
    name: str, every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # may change nothing
    attempts = list(strangers.attack(name, every))
    assert len(attempts) >= 20 // every
    assert [attempt for attempt in attempts if attempt.outcome in BAD] == []
