"""Rates of this machine in large products, and the device that estimates make of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lab.measure import rates
from lab.measure.rates import Rates, copy_rate, measured_rates
from lab.simulate.hardware import THIS_CPU, Device, of_this_machine

DEVICE = Device(THIS_CPU, bandwidth_bytes_per_s=1e10, op_efficiency=(("bmm", 0.5),))


def test_rates_are_measured_once_and_leave_the_threads_as_they_were() -> None:
    before = torch.get_num_threads()
    found = measured_rates(1)
    assert torch.get_num_threads() == before
    # No core computes as little as 1e8 operations a second, or as much as 1e12.
    assert 1e8 < found.product < 1e12 and 1e8 < found.convolution < 1e12
    assert measured_rates(1) is found


def test_the_fastest_trial_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 5.0, 10.0, 11.0] + [20.0, 24.0] * (rates.TRIALS - 2))
    monkeypatch.setattr(rates.time, "perf_counter", lambda: next(clock))
    assert rates._fastest_s(lambda: None) == 1.0


def test_this_cpu_is_as_fast_as_it_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "measured_rates", lambda threads: Rates(2e10 * threads, 1e10))
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
    monkeypatch.setattr(rates, "_fastest_s", lambda copy: copy() or 0.5)
    assert copy_rate(64_000_000, 1) == pytest.approx(64e6 / 0.5)
    assert copy_rate(1_000_000, 1) == pytest.approx(16e6 / 0.5)  # sixteen of them together
