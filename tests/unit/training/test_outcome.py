"""A run's operations: MFU's arithmetic, what is printed, and what cannot be counted."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from lab.distributed.world import World
from lab.measure.operations import Uncountable
from lab.measure.peaks import Peak
from lab.record.schema import ComputeRecord, read_record
from lab.settings.config import RunSettings, load
from lab.sync.drift import GradientNoise
from lab.sync.gradsync import GradSync
from lab.training import outcome
from lab.training.outcome import flops_per_sample, note_rates, peak_of
from lab.training.recording import ProgressBar, summary
from tests.support.records import leave, make_record

COUNTED = ComputeRecord(2e9, None, 1e12, "estimated: a core")


def test_mfu_is_the_share_of_the_peak_that_the_model_needs(tmp_path: Path) -> None:
    record = make_record("none", 1, 0.5, compute=COUNTED, batch_size=64)  # 128 images/s
    note_rates(record)
    assert record.flops_per_s == pytest.approx(256e9)
    assert record.mfu == pytest.approx(0.256)
    line = "compute         0.256 TFLOP/s, 25.6 % of the peak (estimated: a core)"
    assert line in summary(replace(record, warmup=_warmup()), Path())
    leave(tmp_path / "a", record)
    assert read_record(tmp_path / "a" / "record.json") == record


def _warmup() -> Any:
    return SimpleNamespace(num_steps=5, reason="asked")


def test_without_a_peak_there_are_operations_but_no_share() -> None:
    record = make_record("none", 1, 0.5, compute=replace(COUNTED, peak_flops_per_s=None))
    note_rates(record)
    assert record.flops_per_s and record.mfu is None
    text = summary(replace(record, warmup=_warmup()), Path())
    assert "compute         0.256 TFLOP/s\n" in text


@pytest.mark.parametrize("known", [None, ComputeRecord(None, "why", 1e12, "a source")])
def test_what_is_not_counted_has_no_rate(known: ComputeRecord | None) -> None:
    record = make_record("none", 1, 0.5, compute=known)
    note_rates(record)
    assert (record.flops_per_s, record.mfu) == (None, None)
    assert "compute" not in summary(replace(record, warmup=_warmup()), Path())


def test_settings_of_gpus_are_noted_on_cpus() -> None:
    assert outcome.idle_on_cpus(
        cast(RunSettings, load(["tf32=true", "benchmark_limit=10", "share_gpus=true"]))
    ) == [
        "tf32=true: has an effect only on GPUs",
        "share_gpus=true: has an effect only on GPUs",
    ]


def test_a_replayed_model_computes_nothing() -> None:
    config = load(["model=replay", "profile=alexnet_titanx"])
    with pytest.raises(Uncountable, match="model=replay waits and computes nothing"):
        flops_per_sample(config, None, None)  # type: ignore[arg-type]


def world(size: int, device: str, num_hosts: int = 1) -> World:
    place: Any = SimpleNamespace(size=size, device=torch.device(device), num_hosts=num_hosts)
    return place


def test_ranks_on_one_cpu_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(outcome, "cpu_peak", asked.append)
    monkeypatch.setattr(outcome, "num_cores", lambda: 4)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    for size in (1, 2, 8):
        peak_of(world(size, "cpu"))
    peak_of(world(16, "cpu", num_hosts=2))
    monkeypatch.setenv("LAB_EMULATED_HOSTS", "set by the emulated cluster")
    monkeypatch.setattr(outcome, "EMULATION", "LAB_EMULATED_HOSTS")
    peak_of(world(16, "cpu", num_hosts=2))
    assert asked == [1, 2, 4, 8, 4]


def test_ranks_that_share_gpus_do_not_multiply_their_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Peak("a GPU", {"fp32": 1e12}, 1e9, "a datasheet")
    monkeypatch.setattr(outcome, "gpu_peak", {"a GPU": one}.get)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    for size, num_gpus in ((1, 1), (2, 2), (8, 2)):
        peak = peak_of(world(size, "cuda"))
        assert peak and peak.flops_per_s["fp32"] == num_gpus * 1e12
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "another")
    assert peak_of(world(2, "cuda")) is None


def test_timed_steps_are_those_of_whole_rounds() -> None:
    loop: Any = SimpleNamespace(turns=None, first_step=3, sync=SimpleNamespace(every=4))
    timed = outcome._timed(loop, num_steps=13, warmup=3)  # numbers 3 to 15, from 6 on
    assert np.flatnonzero(timed).tolist() == [*range(5, 13)]  # numbers 8 to 15
    assert not outcome._timed(loop, num_steps=8, warmup=3).any()  # numbers 8 to 10: no round


def noise_of(norms: list[tuple[float, float]]) -> dict[str, float | None] | None:
    """The gradient noise of two ranks: squared norms of a rank's gradient and of the mean."""
    sync, noise = GradSync.__new__(GradSync), GradientNoise()
    for local, mean in norms:
        noise.local.append(torch.tensor(local, dtype=torch.float64))
        noise.mean.append(torch.tensor(mean, dtype=torch.float64))
    sync.noise = noise
    world = SimpleNamespace(size=2, gather=lambda each: torch.stack([each, each]))
    loop: Any = SimpleNamespace(sync=sync, world=world, batch_size=32)
    return outcome._gradient_noise(loop, warmup=1)


def test_gradient_noise_leaves_out_steps_that_overflowed() -> None:
    norms = [(9.0, 8.0), (4.0, 2.0), (5.0, 2.5), (4.5, 2.0), (4.0, 2.5)]
    found = noise_of(norms)
    assert found and found["num_steps"] == 4 and found["samples"] is not None
    assert noise_of([*norms[:2], (math.inf, math.inf), *norms[2:]]) == found
    few = noise_of([(9.0, 8.0), (1.0, math.nan)])
    assert few and few["num_steps"] == 0 and math.isnan(few["samples"] or 0)


def test_a_run_that_made_no_step_has_no_gradient_noise() -> None:
    assert noise_of([]) is None


def test_rates_stand_before_the_metrics() -> None:
    tokens = {"unit": "sequence", "prediction": "token", "predictions_per_sample": 100}
    record = make_record("none", 1, 0.5, batch_size=8, compute=COUNTED, **tokens)
    with ProgressBar(record, 20, 10, shown=True) as bar:
        assert "sequences/s" not in str(bar)  # no step was made
        bar.set_postfix({"loss": "2.5"}, refresh=False)
        bar.n += 5
        bar.start_t -= 10  # as if they had taken 10 s
        shown = str(bar)
    assert shown.startswith("none-n1:  75%") and "15/20" in shown
    rates = "4 sequences/s, 400 tokens/s, 0.008 TFLOP/s, MFU 0.8%"
    assert shown.endswith(f"{rates}, loss=2.5]")


def test_other_ranks_show_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressBar(make_record("none", 2, 0.5), 20, 0, shown=False) as bar:
        bar.update(20)
    assert capsys.readouterr().err == ""
