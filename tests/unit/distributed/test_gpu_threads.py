"""Streams, threads and memory of GPUs, on a stand-in that records calls."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from lab.distributed.comm import Comm, run_ranks
from lab.distributed.worker import StreamWorker, Watchdog
from lab.exchange.bucket import GradBucket
from lab.exchange.compressed import OneBit, TopK
from lab.exchange.memory import Owned
from tests.support.worlds import one_of

GPU_3 = torch.device("cuda", 3)


def test_exchanges_have_a_stream_of_high_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[torch.device, int]] = []
    monkeypatch.setattr(
        torch.cuda, "Stream", lambda device, priority=0: made.append((device, priority))
    )
    StreamWorker(GPU_3)
    assert made == [(GPU_3, -1)]


@pytest.mark.parametrize(("device", "expected"), [(GPU_3, [GPU_3]), (torch.device("cpu"), [])])
def test_the_watchdog_is_on_its_ranks_gpu_before_it_asks_anything(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, expected: list[torch.device]
) -> None:
    set_on: list[tuple[str, torch.device]] = []
    monkeypatch.setattr(
        torch.cuda,
        "set_device",
        lambda device: set_on.append((threading.current_thread().name, device)),
    )
    Watchdog(one_of(1, device), 60.0, lambda failure: None).close()
    assert set_on == [("watchdog", each) for each in expected]


class OnGPU(Tensor):
    """A tensor that claims to be on a GPU, and records the streams that keep its memory."""

    is_cuda = True  # type: ignore[assignment]
    kept_for: list[Any]

    def record_stream(self, s: Any) -> None:
        self.kept_for.append(s)


def test_a_flushed_residual_stays_until_the_side_stream_has_read_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"side stream of {device}")
    residuals = [torch.ones(64).as_subclass(OnGPU) for _ in range(3)]
    for residual in residuals:
        residual.kept_for = []
    top_k, one_bit = TopK(ratio=0.5), OneBit()
    top_k.memory._own["w"], one_bit.memory._own["w"] = residuals[:2]
    one_bit.memory._owned["w"] = Owned(0, residuals[2])

    def flush(comm: Comm) -> Tensor:
        bucket = GradBucket({"w": torch.Size((1, 64))}, torch.zeros(64))
        top_k.flush_residual(bucket, comm)
        one_bit.flush_residual(bucket, comm)
        return bucket.flat

    (flat,) = run_ranks(1, flush)
    assert flat.tolist() == [3.0] * 64
    assert not [*top_k.memory.kept(), *one_bit.memory.kept()]
    assert [residual.kept_for for residual in residuals] == [["side stream of cpu"]] * 3
