"""graph=true on a GPU: the bits of a run without a graph. No GPU has run it yet."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.conftest import DEVICE
from tests.gpu.runs import RUN, first_way_to_share, train
from tests.support.cases import STRATEGIES
from tests.support.refused import refusal_of

pytestmark = pytest.mark.skipif(DEVICE != "cuda", reason="a CPU captures nothing")
# A rate that float32 holds exactly, as a graph reads it.
ALIKE = ("deterministic=true", "optim.lr=0.0078125", "optim.schedule=constant")
FIXED = (*RUN, *ALIKE, "optim.warmup_steps=0")
FAMILIES = ("allreduce", "overlap", "ddp", "onebit", "int8", "powersgd", "topk", "zero1", "ring")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_alone_on_its_gpu(strategy: str) -> None:
    if why := refusal_of(strategy):
        pytest.skip(why)
    (replayed,) = train(1, f"strategy={strategy}", "graph=true", *FIXED)
    (by_host,) = train(1, f"strategy={strategy}", *FIXED)
    assert replayed.record["graph_from"] is not None
    assert replayed.record["final"] == by_host.record["final"]
    assert all(torch.equal(w, by_host.weights[n]) for n, w in replayed.weights.items())


@pytest.mark.parametrize("strategy", FAMILIES)
def test_two_ranks_that_share_it(strategy: str) -> None:
    sharing = first_way_to_share()
    if sharing == "gloo":
        pytest.skip("NCCL refuses to share this GPU, and Gloo cannot be captured")
    settings = (f"strategy={strategy}", *FIXED)
    replayed = train(2, *settings, "graph=true", sharing=sharing)
    by_host = train(2, *settings, sharing=sharing)
    assert replayed[0].record["replica_hash"] == by_host[0].record["replica_hash"]
