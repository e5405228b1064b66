"""Every strategy on GPUs: alone by NCCL, and as several ranks that share one, an emulation.

Where there are several, also as ranks with a GPU each, over NCCL and the links that join them.
"""

from __future__ import annotations

import pytest
import torch

from tests.gpu.conftest import DEVICE
from tests.gpu.runs import (
    APART,
    RUN,
    check_exact,
    first_way_to_share,
    needs_send_recv,
    train,
    train_on_cpu,
    transform_of,
)
from tests.support.cases import STRATEGIES
from tests.support.ranks import Outcome

NUM_GPUS = torch.cuda.device_count()


@pytest.fixture(scope="module")
def shared() -> str:
    return first_way_to_share()


@pytest.fixture(scope="module", params=["shared", APART])
def sharing(request: pytest.FixtureRequest) -> str:
    if request.param != APART:
        return request.getfixturevalue("shared")
    if DEVICE == "cuda" and NUM_GPUS < 2:
        pytest.skip(f"ranks with a GPU each need at least 2; there are {NUM_GPUS}")
    return APART


def together(strategy: str, sharing: str, *settings: str) -> list[Outcome]:
    """Train on three ranks, or on as many as there are GPUs for."""
    size = min(NUM_GPUS, 3) if DEVICE == "cuda" and sharing == APART else 3
    if DEVICE == "cuda" and sharing == "gloo" and needs_send_recv(strategy, *settings):
        pytest.skip("NCCL refuses to share this GPU, and Gloo has no send and recv on GPUs")
    return train(size, f"strategy={strategy}", *settings, *RUN, sharing=sharing)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_alone_on_its_gpu(strategy: str) -> None:
    (outcome,) = train(1, f"strategy={strategy}", *RUN)
    assert outcome.record["status"] == "done"
    assert outcome.record["device"] == DEVICE
    assert outcome.record["backend"] == ("nccl" if DEVICE == "cuda" else "gloo")
    check_exact(strategy, outcome, train_on_cpu("strategy=none", transform_of(strategy), *RUN))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_several_ranks(strategy: str, sharing: str) -> None:
    outcomes = together(strategy, sharing)
    record = outcomes[0].record
    assert {outcome.record["status"] for outcome in outcomes} == {"done"}
    if DEVICE == "cuda":
        kinds = [each["kind"] for each in record["emulation"]]
        assert kinds == ([] if sharing == APART else ["shared_gpus"])
        assert sharing != APART or record["backend"] == "nccl"
    if strategy != "none":  # whose replicas drift apart
        assert len({outcome.record["replica_hash"] for outcome in outcomes}) == 1
    (alone,) = train(1, "strategy=none", transform_of(strategy), *RUN)
    check_exact(strategy, outcomes[0], alone)


@pytest.mark.parametrize("exchange", ["allreduce", "ring", "onebit", "bf16"])
def test_overlapped_is_blocking_bit_for_bit(exchange: str, sharing: str) -> None:
    settings = (f"exchange={exchange}", "bucket_mb=0.05", "deterministic=true")
    blocking, overlapped = (
        together("allreduce", sharing, *settings, f"overlap={switch}")
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
def test_resumed_run_ends_in_the_same_bits(strategy: str, shared: str) -> None:
    settings = (f"strategy={strategy}", "deterministic=true", "checkpoint_every=10", *RUN)
    whole = train(2, *settings, "cell=a", sharing=shared)
    half_way = "resume=runs/default/a/checkpoints/step_000010"
    resumed = train(2, *settings, "cell=b", half_way, sharing=shared)
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
