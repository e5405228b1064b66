"""Peaks: a row for each GPU by the name that torch reports, and the estimate of a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lab.measure import peaks
from lab.measure.peaks import GPUS, arithmetic_of, cpu_peak, gpu_peak


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


def test_every_row_names_its_document() -> None:
    assert all("NVIDIA" in row.source and row.bandwidth_bytes_per_s for row in GPUS)
    assert all(row.flops_per_s for row in GPUS)


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
