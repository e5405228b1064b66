"""Every strategy on one GPU, by NCCL alone or as several ranks that share it, as an emulation.

The GPU is the first one, also where there are several: test_several_gpus.py has those.
"""

from __future__ import annotations

import pytest

from tests.gpu.conftest import DEVICE
from tests.gpu.runs import (
    RUN,
    check_exact,
    first_way_to_share,
    needs_send_recv,
    train,
    train_on_cpu,
    transform_of,
)
from tests.support.cases import STRATEGIES


@pytest.fixture(scope="module")
def sharing() -> str:
    return first_way_to_share()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_alone_on_its_gpu(strategy: str) -> None:
    (outcome,) = train(1, f"strategy={strategy}", *RUN)
    assert outcome.record["status"] == "done"
    assert outcome.record["device"] == DEVICE
    assert outcome.record["backend"] == ("nccl" if DEVICE == "cuda" else "gloo")
    check_exact(strategy, outcome, train_on_cpu("strategy=none", transform_of(strategy), *RUN))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_shared_by_several_ranks(strategy: str, size: int, sharing: str) -> None:
    if sharing == "gloo" and DEVICE == "cuda" and needs_send_recv(strategy):
        pytest.skip("NCCL refuses to share this GPU, and Gloo has no send and recv on GPUs")
    outcomes = train(size, f"strategy={strategy}", *RUN, sharing=sharing)
    assert {outcome.record["status"] for outcome in outcomes} == {"done"}
    if DEVICE == "cuda":
        assert [one["kind"] for one in outcomes[0].record["emulation"]] == ["shared_gpus"]
    (alone,) = train(1, "strategy=none", transform_of(strategy), *RUN)
    check_exact(strategy, outcomes[0], alone)


@pytest.mark.parametrize("exchange", ["allreduce", "onebit", "bf16"])
def test_overlapped_is_blocking_bit_for_bit(exchange: str, sharing: str) -> None:
    settings = ("strategy=allreduce", f"exchange={exchange}", "bucket_mb=0.05", *RUN)
    deterministic = "deterministic=true"
    blocking, overlapped = (
        train(2, *settings, deterministic, f"overlap={switch}", sharing=sharing)
        for switch in ("false", "true")
    )
    assert blocking[0].record["replica_hash"] == overlapped[0].record["replica_hash"]


@pytest.mark.parametrize("codec", ["onebit", "int8", "signs", "topk"])
def test_memory_of_ranks_gives_the_bits_of_messages(codec: str) -> None:
    """Over Gloo, beside which symmetric memory needs nothing of the library."""
    settings = ("strategy=overlap", f"codec={codec}", "deterministic=true", *RUN)
    ours, theirs = (train(2, f"path={path}", *settings) for path in ("symmetric", "two_stage"))
    assert [choice["path"] for choice in ours[0].record["choices"]] == ["symmetric"]
    assert ours[0].record["replica_hash"] == theirs[0].record["replica_hash"]


@pytest.mark.parametrize("strategy", ["overlap", "onebit"])
def test_resumed_run_ends_in_the_same_bits(strategy: str, sharing: str) -> None:
    settings = (f"strategy={strategy}", "deterministic=true", "checkpoint_every=10", *RUN)
    whole = train(2, *settings, "cell=a", sharing=sharing)
    half_way = "resume=runs/default/a/checkpoints/step_000010"
    resumed = train(2, *settings, "cell=b", half_way, sharing=sharing)
    assert whole[0].record["replica_hash"] == resumed[0].record["replica_hash"]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_lower_precision_trains(precision: str) -> None:
    (outcome,) = train(1, "strategy=onebit", f"precision={precision}", *RUN)
    assert outcome.record["final"]["loss"] < 2.303
    assert outcome.record["step_s"]["median"] > 0


def test_breakdown_times_phases_on_the_device() -> None:
    (outcome,) = train(1, "strategy=overlap", "measure=breakdown", *RUN)
    phases = outcome.record["phases_s"]
    assert all(phases[name] > 0 for name in ("forward", "backward", "update"))
