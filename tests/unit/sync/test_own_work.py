"""The own work of ranks, threads of one process, of which one is late."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from lab.distributed.comm import Comm, run_ranks
from lab.distributed.worker import InlineWorker, ThreadWorker, Worker
from lab.exchange.bucket import GradBucket
from lab.measure.clock import Clock
from lab.measure.spans import OWN
from lab.settings.config import build, load
from lab.sync.base import SyncParts
from lab.sync.gradsync import GradSync
from lab.sync.pattern import alike

CPU = torch.device("cpu")
LATE, LATE_S = 1, 0.06
SHORT_S = 0.04  # work without a delay takes less, waiting for it more
NUM_LATE = 4  # steps, of which the shortest counts: threads keep each other from work


def own_of_a_step(comm: Comm, config: DictConfig, phase: str) -> dict[str, float]:
    """Return the least own times of steps in which rank 1 is late."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    worker: Worker = ThreadWorker(CPU) if config.overlap else InlineWorker()
    parts = SyncParts(net, net, build(config.exchange), comm, worker, config.overlap, 0)
    with GradSync(parts) as sync:
        sync.clock = clock = Clock(CPU, breakdown=False)
        _step(sync, net)
        if comm.rank == LATE and phase == "backward":
            next(net.parameters()).register_hook(lambda _: time.sleep(LATE_S))
        for _ in range(NUM_LATE):
            if comm.rank == LATE and phase == "exchange":
                comm.before_sending = _once()
            _step(sync, net)
    worker.close()
    least = clock.own_times().own_seconds()[1:].min(axis=0)
    return dict(zip(OWN, least.tolist(), strict=True))


def _step(sync: GradSync, net: nn.Module) -> None:
    clock = sync.clock
    assert clock
    with clock.step(), sync.micro_batch(last=True):
        loss: Tensor = net(torch.ones(4, 64)).sum()
        with clock.phase("backward"):
            loss.backward()
        with clock.phase("exchange"):
            sync.finish()


def _once() -> Any:
    due = [LATE_S]
    return lambda: time.sleep(due.pop()) if due else None


@pytest.mark.parametrize("phase", ["backward", "exchange"])
@pytest.mark.parametrize(
    "strategy", ["allreduce", "overlap", "ring", "star", "onebit", "powersgd", "auto"]
)
def test_the_late_rank_works_longer_and_those_that_wait_do_not(strategy: str, phase: str) -> None:
    config = load([f"strategy={strategy}"])
    late, *others = sorted(
        run_ranks(3, lambda comm: (comm.rank != LATE, own_of_a_step(comm, config, phase))),
        key=lambda pair: pair[0],
    )
    assert LATE_S <= late[1][phase] < LATE_S + SHORT_S, late
    assert all(own[phase] < SHORT_S for _, own in others)
    other = {"backward": "exchange", "exchange": "backward"}[phase]
    assert late[1][other] < SHORT_S


EXCHANGES = (
    *("overlap", "priority", "ring", "onebit", "ddp", "local_sgd", "zero1", "int4", "onebit_adam"),
    *("hierarchical", "hierarchical_onebit", "des_loc", "streaming_diloco", "schedule"),
)


@pytest.mark.parametrize(
    ("settings", "unlike"),
    [
        *((name, set()) for name in EXCHANGES),
        *((name, {"exchange"}) for name in ("tree", "tree_double", "tree_pipelined", "star")),
        ("muon", {"exchange"}),  # the owner of the dearest matrix computes longest
        ("hierarchical exchange@exchange.inter=tree", {"exchange"}),
        ("schedule exchange@exchange.first=star", {"exchange"}),
        *((name, {"update"}) for name in ("fsdp", "hsdp")),
        *((name, {"exchange", "update"}) for name in ("caffe", "torch7", "tensorflow")),
    ],
)
def test_ranks_that_have_more_to_do_are_not_compared(settings: str, unlike: set[str]) -> None:
    assert set(alike(load(f"strategy={settings}".split()))) == set(OWN) - unlike


def test_ranks_of_uneven_nodes_are_not_compared() -> None:
    """The exchange itself, on nodes of one and three ranks: the sole rail has more to send."""
    config = load(["strategy=hierarchical"])

    def rank_main(comm: Comm) -> int:
        values = GradBucket({"w": torch.Size([8, 64])}, torch.ones(512))
        build(config.exchange).average(values, comm)
        return comm.traffic.payload_bytes

    uneven = run_ranks(4, rank_main, [[0], [1, 2, 3]])
    even = run_ranks(4, rank_main, [[0, 1], [2, 3]])
    assert set(alike(config, uneven)) == set(OWN) - {"exchange"}
    assert set(alike(config, even)) == set(OWN)
