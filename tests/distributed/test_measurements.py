"""A record counts time between steps, but no warm-up, evaluation or checkpoint."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lab.distributed import world as worlds
from lab.measure.memory import PeakMemory
from lab.record.run_directory import RunDirectory
from lab.record.schema import Record
from lab.settings.config import ConfigError, load
from lab.training import outcome, recording
from lab.training.assemble import assembled
from tests.support.ranks import join, spawn
from tests.support.records import make_record

BETWEEN_S, EVALUATION_S = 10.0, 1000.0  # far more than steps take, even on a busy machine


class Noted(PeakMemory):
    """Notes after how many steps it was told what."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.log: list[str] = []

    def resume(self) -> None:
        if not self.is_running:
            self.log.append("steady")
        super().resume()

    def pause(self) -> None:
        super().pause()
        self.log.append("pause")


def measured(path: Path) -> tuple[Record, float, list[str]]:
    """Ten steps, an evaluation after six: the record, seconds of timed steps, what memory knew."""
    clock, passed = time.perf_counter, [0.0]
    time.perf_counter = lambda: clock() + sum(passed)  # so that nobody has to wait
    config = load(["device=cpu", "data.size=16", "batch_size=24", "steps=10", "warmup_steps=3"])
    with assembled(config, join()) as part:
        trainer = part.trainer
        trainer.memory = memory = Noted()
        batches = trainer.data.test_batches

        def slow(*arguments: int) -> Iterator[Any]:
            passed.append(EVALUATION_S)
            return batches(*arguments)

        trainer.data.test_batches = slow  # type: ignore[method-assign]
        for step in trainer.steps():
            passed.append(BETWEEN_S)
            memory.log.append(str(step))
            if step == 6:
                trainer.evaluate()
        trainer.evaluate()
        begun = make_record("overlap", 1, None, batch_size=24, backend="gloo", gradient_bytes=4)
        record = outcome.measured(trainer, begun, RunDirectory(path))
        seconds = float(trainer.clock.step_seconds()[3:].sum())
    worlds.stop()
    return record, seconds, memory.log


def test_wall_clock_and_memory_are_those_of_steady_steps(tmp_path: Path) -> None:
    (answer,) = spawn(1, measured, tmp_path)
    record, seconds, log = answer
    steady = ["1", "2", "3", "steady", "4", "5", "6", "pause", "steady", "7", "8", "9", "10"]
    assert log == [*steady, "pause", "pause"]
    assert record.num_timed_steps == 7 and record.wall_samples_per_s
    wall_s = 7 * 24 / record.wall_samples_per_s
    least = seconds + 5 * BETWEEN_S  # of six times between seven steps one has the evaluation
    assert least <= wall_s < least + 0.8 * EVALUATION_S
    assert record.peak_memory_of == "resident set of the process, since its start"
    assert record.peak_memory_bytes and record.peak_memory_bytes[0] > 2**20
    assert record.reserved_memory_bytes is None and record.device_memory_bytes is None
    text = recording.summary(record, tmp_path)
    assert f"speed           {record.rates(record.wall_samples_per_s)}, wall clock" in text


def test_on_a_gpu_the_peak_is_that_of_steady_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    peak = [700]  # of the warm-up
    monkeypatch.setattr(
        torch.cuda, "reset_peak_memory_stats", lambda _: peak.__setitem__(slice(None), [0])
    )
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: max(peak))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 800)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1000, 3000))
    memory = PeakMemory(torch.device("cuda"))
    assert memory.sizes() == (0, 800, 2000)
    for in_use in (300, 500, 400):
        for _ in range(3):
            memory.resume()
            peak.append(in_use)
        memory.pause()
        peak.append(900)  # an evaluation
    memory.pause()
    assert memory.sizes() == (500, 800, 2000)
    assert memory.kind == "tensors, in steady steps"


def noise(path: Path, *settings: str) -> dict[str, float | None] | None:
    """The gradient noise of twelve steps."""
    common = ["device=cpu", "data.size=64", "batch_size=32", "steps=12", "warmup_steps=2"]
    with assembled(load([*common, "measure=noise", *settings]), join()) as part:
        for _ in part.trainer.steps():
            pass
        part.trainer.evaluate()
        begun = make_record("allreduce", 2, None, batch_size=32, backend="gloo", gradient_bytes=4)
        record = outcome.measured(part.trainer, begun, RunDirectory(path))
    worlds.stop()
    return record.gradient_noise


@pytest.mark.slow
def test_gradient_noise_is_the_same_whatever_exact_exchange_finds_it(tmp_path: Path) -> None:
    found = [
        spawn(2, noise, tmp_path, f"strategy={name}") for name in ("allreduce", "overlap", "tree")
    ]
    (first, other), *others = found
    assert first and first == other and first["num_steps"] == 10
    for pair in others:
        assert pair[0] == {key: pytest.approx(value, rel=1e-4) for key, value in first.items()}


def refusals() -> list[str]:
    world, found = join(), []
    for strategy in ("none", "onebit", "caffe"):
        settings = ["device=cpu", "measure=noise", f"strategy={strategy}"]
        try:
            with assembled(load(settings), world):
                found.append("taken")
        except ConfigError as error:
            found.append(str(error))
    worlds.stop()
    return found


def test_noise_needs_exact_means_of_gradients() -> None:
    for found in spawn(2, refusals):
        assert len(found) == 3 and all("averages gradients exactly" in each for each in found)
