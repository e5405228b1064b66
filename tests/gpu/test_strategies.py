"""Every strategy on one GPU, by NCCL alone or as several ranks that share it, as an emulation.

NCCL refuses two ranks on one GPU unless each believes to be on a host of its own (NCCL_HOSTID), or
NCCL is new enough for NCCL_MULTI_RANK_GPU_ENABLE. `sharing` finds out what this machine allows;
Gloo moves CUDA tensors on every one, but has no send and recv for them.
"""

from __future__ import annotations

import os

import pytest
import torch

from tests.distributed.ranks import STRATEGIES, Outcome, execute, join, spawn
from tests.distributed.test_strategies import EXACT, distance
from tests.gpu.conftest import DEVICE

RUN = ("data.size=16", "batch_size=24", "optim.lr=0.01", "steps=20", "warmup_steps=2")
NEED_SEND_RECV = ("tree", "tree_pipelined", "tree_double", "ring", "star")


def on_gpu(settings: tuple[str, ...], sharing: str = "gloo") -> Outcome:
    """One rank of a run on the GPU that all share."""
    allow_sharing(sharing)
    backend = "backend=nccl" if sharing.startswith("nccl") else "backend=gloo"
    alone = os.environ["WORLD_SIZE"] == "1" and DEVICE == "cuda"
    return execute(
        (f"device={DEVICE}", "share_gpus=true", "backend=auto" if alone else backend, *settings)
    )


def allow_sharing(sharing: str) -> None:
    if sharing == "nccl by host":
        os.environ["NCCL_HOSTID"] = f"host-{os.environ['RANK']}"
    if sharing == "nccl by switch":
        os.environ |= {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "4"}


def reduce_once(sharing: str) -> float:
    """Whether two NCCL ranks on one GPU can do anything at all."""
    allow_sharing(sharing)
    world = join("device=cuda", "share_gpus=true", "backend=nccl", "exchange_timeout_s=20")
    ones = torch.ones(1000, device=world.device)
    world.comm.all_reduce(ones)
    return float(ones.sum())


@pytest.fixture(scope="module")
def sharing() -> str:
    """The first way to share the GPU that works."""
    for way in ("nccl by host", "nccl by switch") if DEVICE == "cuda" else ():
        try:
            if spawn(2, reduce_once, way, timeout_s=60) == [2000.0, 2000.0]:
                return way
        except AssertionError:
            continue
    return "gloo"


def train(size: int, *settings: str, sharing: str = "gloo") -> list[Outcome]:
    return spawn(size, on_gpu, settings, sharing, timeout_s=100)


def on_cpu(*settings: str) -> Outcome:
    return spawn(1, execute, settings)[0]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_alone_on_its_gpu(strategy: str) -> None:
    (outcome,) = train(1, f"strategy={strategy}", *RUN)
    assert outcome.record["status"] == "done"
    assert outcome.record["device"] == DEVICE
    assert outcome.record["backend"] == ("nccl" if DEVICE == "cuda" else "gloo")
    if strategy in EXACT:
        transform = "fc1x1" if strategy == "fc1x1" else "none"
        reference = on_cpu("strategy=none", f"transform={transform}", *RUN)
        weights = {name: weight.cpu() for name, weight in outcome.weights.items()}
        assert distance(weights, reference.weights) < 1e-3  # GPUs multiply in TF32 and other orders


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_shared_by_several_ranks(strategy: str, size: int, sharing: str) -> None:
    if sharing == "gloo" and DEVICE == "cuda" and strategy in NEED_SEND_RECV:
        pytest.skip("NCCL refuses to share this GPU, and Gloo has no send and recv on GPUs")
    outcomes = train(size, f"strategy={strategy}", *RUN, sharing=sharing)
    assert {outcome.record["status"] for outcome in outcomes} == {"done"}
    if DEVICE == "cuda":
        assert "share 1 GPU" in outcomes[0].record["emulation"]
    if strategy in EXACT:
        transform = "fc1x1" if strategy == "fc1x1" else "none"
        (alone,) = train(1, "strategy=none", f"transform={transform}", *RUN)
        assert distance(outcomes[0].weights, alone.weights) < 1e-3


@pytest.mark.parametrize("exchange", ["allreduce", "onebit", "bf16"])
def test_overlapped_is_blocking_bit_for_bit(exchange: str, sharing: str) -> None:
    settings = ("strategy=allreduce", f"exchange={exchange}", "bucket_mb=0.05", *RUN)
    deterministic = "deterministic=true"
    blocking, overlapped = (
        train(2, *settings, deterministic, f"overlap={switch}", sharing=sharing)
        for switch in ("false", "true")
    )
    assert blocking[0].record["replica_hash"] == overlapped[0].record["replica_hash"]


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
