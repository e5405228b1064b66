"""Peaks of GPUs by the names that torch reports, of CPUs, and rates of this one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lab.measure import peaks
from lab.measure.peaks import (
    Rates,
    arithmetic_of,
    copy_rate,
    cpu_peak,
    gpu_peak,
    measured_rates,
)
from lab.simulate.hardware import THIS_CPU, Device, of_this_machine


@pytest.mark.parametrize(
    ("name", "precision", "rate"),
    [
        ("NVIDIA GeForce GTX TITAN X", "fp32", 6.144e12),
        ("GeForce GTX TITAN X", "fp32", 2 * 3072 * 1.0e9),
        ("Tesla P100-SXM2-16GB", "fp16", 21.2e12),
        ("Tesla V100-SXM2-32GB", "fp16", 125e12),
        ("NVIDIA A100-SXM4-80GB", "tf32", 156e12),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.5e12),
        ("NVIDIA H200", "bf16", 989.5e12),
        ("NVIDIA A10", "fp32", 31.2e12),
    ],
)
def test_a_gpu_has_the_figure_of_its_datasheet(name: str, precision: str, rate: float) -> None:
    found = gpu_peak(name)
    assert found and found.flops_per_s[precision] == pytest.approx(rate)
    two = found.times(2)
    assert two.flops_per_s[precision] == pytest.approx(2 * rate)
    assert two.source == f"2 x {found.source}"


@pytest.mark.parametrize("name", ["NVIDIA A10G", "NVIDIA H100 NVL", "TITAN X (Pascal)", "CPU"])
def test_a_gpu_that_is_not_in_the_table_has_no_figure(name: str) -> None:
    assert gpu_peak(name) is None


def test_a_cpu_is_cores_times_clock_times_operations(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor : 0\ncpu MHz\t\t: 2000.0\nprocessor : 1\ncpu MHz\t\t: 2500.0\n")
    monkeypatch.setattr(peaks, "MAX_CLOCK", tmp_path / "no such file")
    monkeypatch.setattr(peaks, "CPUINFO", info)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    found = cpu_peak(2)
    assert found and found.flops_per_s == {"fp32": 2 * 2.5e9 * 64}
    assert found.source == "estimated: 2 cores x 2.50 GHz x 64 FLOP (AVX512)"
    maximum = tmp_path / "cpuinfo_max_freq"
    maximum.write_text("3000000\n")
    monkeypatch.setattr(peaks, "MAX_CLOCK", maximum)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    found = cpu_peak(1)
    assert found and found.flops_per_s == {"fp32": 3e9 * 32}


def test_a_cpu_that_reports_no_clock_has_no_peak(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(peaks, "MAX_CLOCK", tmp_path / "none")
    monkeypatch.setattr(peaks, "CPUINFO", tmp_path / "none")
    assert cpu_peak(1) is None


def test_tf32_is_a_peak_of_its_own() -> None:
    assert arithmetic_of("fp32", tf32=True) == "tf32"
    assert arithmetic_of("fp32", tf32=False) == "fp32"
    assert arithmetic_of("bf16", tf32=True) == "bf16"


DEVICE = Device(THIS_CPU, bandwidth_bytes_per_s=1e10, op_efficiency=(("bmm", 0.5),))


def test_rates_are_measured_once_and_leave_the_threads_as_they_were() -> None:
    before = torch.get_num_threads()
    found = measured_rates(1)
    assert torch.get_num_threads() == before
    # No core computes as little as 1e8 operations a second, or as much as 1e12.
    assert 1e8 < found.product < 1e12 and 1e8 < found.convolution < 1e12
    assert measured_rates(1) is found


def test_the_fastest_trial_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    trials = iter([5.0, 1.0] + [4.0] * (peaks.TRIALS - 2))
    monkeypatch.setattr("timeit.Timer.timeit", lambda _timer, _number: next(trials))
    assert peaks._fastest_s(lambda: None) == 1.0


def test_this_cpu_is_as_fast_as_it_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peaks, "measured_rates", lambda threads: Rates(2e10 * threads, 1e10))
    found = of_this_machine(replace(DEVICE, num_threads=2))
    assert found.peak_flops_per_s == (("fp32", 4e10),)
    assert dict(found.op_efficiency) == {
        "convolution": 0.25,
        "convolution_backward": 0.25,
        "bmm": 0.5,
    }
    assert found.source == (
        "measured: large products on 2 threads; convolutions reach 0.25 times as much"
    )
    own = replace(DEVICE, peak_flops_per_s=(("fp32", 1e9),))
    assert of_this_machine(own) is own


def test_copies_are_counted_in_bytes_read_and_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def half_a_second(copy: Callable[[], object], _repeats: int) -> float:
        copy()
        return 0.5

    monkeypatch.setattr(peaks, "_fastest_s", half_a_second)
    assert copy_rate(64_000_000, 1) == pytest.approx(64e6 / 0.5)
    assert copy_rate(1_000_000, 1) == pytest.approx(16e6 / 0.5)  # sixteen of them together
