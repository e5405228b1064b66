"""Calls are timed together, between two events, while the stream is held."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lab.benchmarks import harness
from lab.benchmarks.harness import NUM_CALLS, CallTiming, aligner, per_call
from lab.distributed.comm import Traffic
from lab.measure.layers import LONGEST_S, spin_stream
from tests.support.fake_gpu import CUDA, FakeGpu


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    made = FakeGpu()
    made.install(monkeypatch, harness)
    return made


def test_calls_follow_barrier_and_event_and_no_host_waits_between(gpu: FakeGpu) -> None:
    def align() -> None:
        gpu.kernel("barrier", 1e-5)

    per_call(lambda: gpu.kernel("call", 1e-3), NUM_CALLS, CUDA, align)
    timed = ["event", *["call"] * NUM_CALLS, "event"]
    assert gpu.log == ["synchronize", "call", "sleep", "barrier", *timed, "synchronize"]
    assert NUM_CALLS >= 20


@pytest.mark.parametrize("launch_s", [2e-6, 2e-4])
def test_launches_are_beside_the_time_and_not_in_it(gpu: FakeGpu, launch_s: float) -> None:
    took = per_call(lambda: gpu.kernel("call", 5e-5, launch_s), NUM_CALLS, CUDA)
    assert took.call_s == pytest.approx(5e-5)
    assert took.host_s == pytest.approx(launch_s)


def test_a_call_that_waits_for_the_device_is_timed_with_its_waiting(gpu: FakeGpu) -> None:
    def call() -> None:
        gpu.kernel("call", 5e-5, launch_s=1e-4)
        gpu.synchronize()

    assert per_call(call, NUM_CALLS, CUDA).call_s == pytest.approx(1.5e-4, rel=0.1)


def test_on_cpus_the_host_waits_for_all_ranks_and_times_itself(gpu: FakeGpu) -> None:
    def call() -> None:
        gpu.host_s += 0.5

    took = per_call(call, 3, torch.device("cpu"), lambda: gpu.log.append("barrier"))
    assert took == CallTiming(0.5, None) and gpu.log == ["barrier"]


def test_on_gpus_ranks_are_aligned_by_their_streams_which_nobody_counts() -> None:
    def all_reduce(tensor: torch.Tensor) -> None:
        comm.traffic.payload_bytes += tensor.nbytes
        aligned.append(tensor)

    aligned: list[torch.Tensor] = []
    comm = SimpleNamespace(all_reduce=all_reduce, traffic=Traffic())
    world: Any = SimpleNamespace(device=torch.device("meta"), comm=comm)  # stands for a GPU
    aligner(world)()
    assert len(aligned) == 1 and comm.traffic == Traffic()


def test_a_stream_is_never_held_for_long(gpu: FakeGpu) -> None:
    spin_stream(3600)
    assert gpu.free_s == pytest.approx(LONGEST_S)


def test_a_torch_without_the_private_sleep_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cuda, "_sleep")
    with pytest.warns(
        UserWarning, match="torch.cuda._sleep no longer exists, so kernel times may include"
    ):
        spin_stream(1e-3)
