"""Payload as Comm books it, against the bytes that really crossed the loopback interface."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lab.distributed import world as worlds
from lab.distributed.worker import make_worker
from lab.distributed.world import World
from lab.exchange.bucket import GradBucket
from lab.settings.config import build, load
from lab.simulate.costs import payload_bytes
from lab.simulate.network import Network
from lab.sync.base import SyncParts
from tests.support.cases import COUNTED, LINKS, REPEATABLE, exchange_settings
from tests.support.hosts import enter_network, has_own_network, own_network
from tests.support.ranks import Crew, join

# The interface counts what everyone sends: nobody else does in a network of its own.
OWN_NETWORK = has_own_network()
pytestmark = pytest.mark.xdist_group("wire") if OWN_NETWORK else pytest.mark.alone
ROWS, COLUMNS = 1536, 1024
NUM_VALUES = ROWS * COLUMNS
NUM_EXCHANGES = 4
OnRanks = Callable[..., list[tuple[int, int]]]


def loopback_bytes() -> int:
    """Bytes that were sent over the loopback interface since the machine started."""
    line = next(
        line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip()[:3] == "lo:"
    )
    return int(line.split(":")[1].split()[8])


@pytest.fixture(scope="module")
def on_ranks() -> Iterator[OnRanks]:
    """Call a function on each of some ranks, as Crew.call does, in a network of their own."""
    crew = Crew()
    with own_network() if OWN_NETWORK else nullcontext() as network:
        yield lambda size, *call: crew.call(size, on_network, network, *call)
        crew.dismiss()


def on_network(network: int | None, rank_main: Callable[[str], Any], name: str) -> Any:
    if network is not None:
        enter_network(network)
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # the test's store is outside
    return rank_main(name)


def exchange_some(exchange: str) -> tuple[int, int]:
    """Payload this rank booked for one exchange, and bytes the interface counted for all ranks."""
    world = join()
    settings = [f"exchange={exchange}", *COUNTED.get(exchange, ())]
    average = build(load(settings).exchange).average
    flat = torch.randn(NUM_VALUES)

    def run() -> None:
        average(GradBucket({"w": torch.Size((ROWS, COLUMNS))}, flat.clone()), world.comm)

    return count(run, world)


def step_some(strategy: str) -> tuple[int, int]:
    """The same for one step of a strategy that moves more than gradients."""
    world, config = join(), load(f"strategy={strategy}".split())
    model, exchange = nn.Linear(COLUMNS, ROWS, bias=False), build(config.exchange)
    worker = make_worker(config.overlap, world.device, world.comm.backend, False)
    settings = config.overlap, config.bucket_mb
    sync = build(config.sync, SyncParts(model, model, exchange, world.comm, worker, *settings))

    def run() -> None:
        model.weight.grad = torch.randn(ROWS, COLUMNS)
        sync.finish()
        sync.after_update(last=False)

    answer = count(run, world)
    worker.close()
    return answer


def count(run: Callable[[], None], world: World) -> tuple[int, int]:
    """Bytes for one `run`, booked by this rank and counted for all."""
    run()  # connections are made at the first
    world.barrier()
    before, booked = loopback_bytes(), world.comm.traffic.payload_bytes
    world.barrier()
    for _ in range(NUM_EXCHANGES):
        run()
    world.barrier()
    counted = loopback_bytes() - before
    worlds.stop()
    return (world.comm.traffic.payload_bytes - booked) // NUM_EXCHANGES, counted // NUM_EXCHANGES


def theory(exchange: str, size: int) -> float:
    """Bytes that the busiest rank sends for the matrix, as the exchange's card has them."""
    settings = exchange_settings(exchange, *COUNTED.get(exchange, ()))
    return payload_bytes([(ROWS, COLUMNS)], settings, Network(LINKS, size))


# On more ranks those whose share of the bytes is another one for each of them.
CASES = [(exchange, 2) for exchange in REPEATABLE]
CASES += [(e, size) for e in ("allreduce", "tree", "tree_double", "onebit") for size in (3, 4)]


@pytest.mark.parametrize(("exchange", "size"), CASES)
def test_booked_is_what_crossed_and_what_its_card_says(
    on_ranks: OnRanks, exchange: str, size: int
) -> None:
    check(on_ranks(size, exchange_some, exchange), theory(exchange, size))


# Gradients and weights along the same path are what gradients and means are.
STEPS = [("caffe", "tree", 3), ("torch7", "star", 2), ("tensorflow", "star", 2)]


@pytest.mark.parametrize(("strategy", "exchange", "size"), STEPS)
def test_all_that_a_step_moves_is_booked(
    on_ranks: OnRanks, strategy: str, exchange: str, size: int
) -> None:
    check(on_ranks(size, step_some, strategy), theory(exchange, size))


def check(answers: list[tuple[int, int]], expected: float) -> None:
    booked = [payload for payload, _ in answers]
    counted = min(crossed for _, crossed in answers)  # each saw all; the first saw least noise
    assert max(booked) == pytest.approx(expected, rel=0.05)
    assert sum(booked) == pytest.approx(counted, rel=0.05)


@pytest.mark.parametrize("size", [2, 4])
def test_none_moves_nothing(on_ranks: OnRanks, size: int) -> None:
    assert all(payload == 0 for payload, _ in on_ranks(size, exchange_some, "none"))
