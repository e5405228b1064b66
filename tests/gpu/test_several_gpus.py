"""Ranks with a GPU each, over NCCL and the links that really join them."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.conftest import DEVICE
from tests.gpu.runs import APART, RUN, check_exact, train, transform_of
from tests.support.cases import STRATEGIES

NUM_GPUS = torch.cuda.device_count()
SIZE = min(NUM_GPUS, 3) if DEVICE == "cuda" else 3

pytestmark = pytest.mark.skipif(
    SIZE < 2, reason=f"ranks with a GPU each need at least 2; there are {NUM_GPUS}"
)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_rank_has_its_gpu(strategy: str) -> None:
    outcomes = train(SIZE, f"strategy={strategy}", *RUN, sharing=APART)
    record = outcomes[0].record
    assert {outcome.record["status"] for outcome in outcomes} == {"done"}
    if DEVICE == "cuda":
        assert (record["backend"], record["emulation"]) == ("nccl", [])
    if strategy != "none":  # whose replicas drift apart
        assert len({outcome.record["replica_hash"] for outcome in outcomes}) == 1
    (alone,) = train(1, "strategy=none", transform_of(strategy), *RUN)
    check_exact(strategy, outcomes[0], alone)


@pytest.mark.parametrize("exchange", ["ring", "onebit", "bf16"])
def test_overlapped_is_blocking_bit_for_bit(exchange: str) -> None:
    settings = ("strategy=allreduce", f"exchange={exchange}", "bucket_mb=0.05", *RUN)
    blocking, overlapped = (
        train(SIZE, *settings, "deterministic=true", f"overlap={switch}", sharing=APART)
        for switch in ("false", "true")
    )
    assert blocking[0].record["replica_hash"] == overlapped[0].record["replica_hash"]
