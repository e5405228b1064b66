"""Benchmarks and studies on a machine with few GPUs, which are faked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lab import bench
from lab.benchmarks import codec, collective, harness
from lab.benchmarks.present import text_of
from lab.benchmarks.request import read, with_world_size
from lab.distributed import world
from lab.distributed.comm import run_ranks
from lab.exchange.allreduce import AllReduce
from lab.study import grid
from tests.support.commands import refusal
from tests.support.fake_gpu import CUDA, FakeGpu
from tests.support.slow import some_of
from tests.unit.benchmarks.test_shown import committed


def num_ranks(*settings: str) -> int:
    return with_world_size(read(["step", "strategy=overlap,ddp", *settings])).own["world_size"]


def has_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(world, "check_gpus", lambda device, _: device != "cpu" and count > 0)


def test_two_ranks_are_started_unless_there_is_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for count in (0, 1, 2, 8):
        has_gpus(monkeypatch, count)
        found.append(num_ranks())
    assert found == [2, 1, 2, 2]
    has_gpus(monkeypatch, 1)
    assert num_ranks("device=cpu") == 2
    assert num_ranks("share_gpus=true") == 2
    assert num_ranks("world_size=4", "batch_size=8") == 4  # as requested; ranks may refuse it


def test_one_gpu_has_nothing_to_exchange_and_one_line_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    has_gpus(monkeypatch, 1)
    error = refusal(bench.main, "collective")
    assert "world_size=1: a single rank exchanges nothing" in error
    assert "device=cpu" in error and "share_gpus=true backend=gloo" in error


@pytest.mark.parametrize("name", some_of(["error_feedback", "kim2017", "codecs"], every=3))
def test_studies_that_ask_nothing_of_gpus_stay_on_cpus(name: str) -> None:
    assert {cell.config.device for cell in grid.read([f"study={name}"]).cells} == {"cpu"}


def test_a_gpu_codec_is_measured_beyond_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    def measured(_: object, shape: tuple[int, int], device: torch.device, __: int) -> Any:
        asked[device.type] = shape[0] * shape[1]
        raise torch.OutOfMemoryError

    monkeypatch.setattr(codec, "_measure_all", measured)
    for count, device in ((1, "cuda"), (0, "cpu")):
        has_gpus(monkeypatch, count)
        with pytest.raises(Exception, match="too many for this GPU's memory"):
            codec.measure(read(["codec", "columns=1000"]))
        assert asked[device] == {"cuda": 400_000_000, "cpu": 25_000_000}[device]


def test_codec_and_reference_take_turns_of_many_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu()
    gpu.install(monkeypatch, harness)

    def run() -> None:
        gpu.kernel("encode", 2e-4, 1e-5)

    encode = codec.TimedOperation("onebit", "encode", run, 1, harness.NUM_CALLS)
    encode.take_turn(lambda: gpu.kernel("copy", 1e-4), CUDA)
    assert encode.call_s == pytest.approx([2e-4]) and encode.reference_s == pytest.approx([1e-4])
    assert encode.host_s == pytest.approx([1e-5])
    assert gpu.log.count("encode") == gpu.log.count("copy") == harness.NUM_CALLS + 1


def test_collectives_over_nccl_are_timed_together_at_every_size() -> None:
    over = {name: SimpleNamespace(comm=SimpleNamespace(backend=name)) for name in ("nccl", "gloo")}
    sizes = (4096, 2**26, 2**30)
    assert [collective.calls_together(n, over["nccl"]) for n in sizes] == [20] * 3  # type: ignore[arg-type]
    assert [collective.calls_together(n, over["gloo"]) for n in sizes] == [20, 1, 1]  # type: ignore[arg-type]


def test_a_collective_has_its_time_by_events_and_its_cost_to_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def rank_main(comm: Any) -> list[dict[str, Any]]:
        candidates = collective.make_candidates({}, comm)[:1]
        here = SimpleNamespace(device=CUDA, comm=comm, rank=comm.rank, size=comm.size)
        here.gather = lambda values: values[None]
        here.barrier = lambda: None
        return collective.measure_size(4096, here, 3, candidates)  # type: ignore[arg-type]

    gpu = FakeGpu()
    gpu.install(monkeypatch, harness)
    for name in ("empty", "zeros"):  # tensors lie on the CPU
        made = getattr(torch, name)
        monkeypatch.setattr(
            torch, name, lambda *a, made=made, **k: made(*a, **{**k, "device": "cpu"})
        )
    all_reduce = AllReduce.average
    monkeypatch.setattr(
        AllReduce, "average", lambda *a: (gpu.kernel("call", 3e-5, 1e-5), all_reduce(*a))
    )
    ((row,),) = run_ranks(1, rank_main)
    assert row["time_s"]["median"] == pytest.approx(3e-5)
    assert row["host_s"] == pytest.approx(1e-5)
    assert row["wrong"] == 0


@pytest.mark.parametrize("name", ["collective", "codec"])
def test_tables_of_gpus_show_the_host_and_what_stays_in_the_cache(name: str) -> None:
    result: dict[str, Any] = committed(name) | {"cache_bytes": 600e6}
    assert "host (us)" not in text_of(result)
    rows = [{**row, "host_s": 4.25e-5} for row in result["rows"]]
    text = text_of({**result, "rows": rows})
    assert "host (us)" in text and "42.5" in text
    assert "tensors of up to 600 MB stay in the GPU's cache" in text
