"""Payload as Comm counts it, against the bytes that crossed the interfaces."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from statistics import median_low
from typing import Any

import pytest
import torch
from omegaconf import DictConfig
from torch import nn

from lab.certificate.traffic import sent_bytes
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
from tests.support.slow import some_of

# The interface counts all processes' bytes; in a separate network nobody else sends.
OWN_NETWORK = has_own_network()
pytestmark = pytest.mark.xdist_group("wire") if OWN_NETWORK else pytest.mark.alone
ROWS, COLUMNS = 1536, 1024
NUM_VALUES = ROWS * COLUMNS
NUM_EXCHANGES = 4
OnRanks = Callable[..., list[tuple[int, int]]]


@pytest.fixture(scope="module")
def on_ranks() -> Iterator[OnRanks]:
    """Call a function on each rank, as Crew.call does, in a separate network."""
    crew = Crew()
    with own_network() if OWN_NETWORK else nullcontext() as network:
        yield lambda size, *call: crew.call(size, on_network, network, *call)
        crew.dismiss()


def on_network(network: int | None, rank_main: Callable[..., Any], *given: Any) -> Any:
    if network is not None:
        enter_network(network)
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # the test's store is outside
        # Its port is free outside; inside, Gloo may hold it, so stay below those that Linux picks.
        os.environ["MASTER_PORT"] = str(10_000 + int(os.environ["MASTER_PORT"]) % 20_000)
    return rank_main(*given)


def exchange_some(config: DictConfig) -> tuple[int, int]:
    """Return this rank's payload of one exchange, and the bytes that crossed for all ranks."""
    world = join()
    average = build(config.exchange).average
    flat, steps = torch.randn(NUM_VALUES), itertools.count()

    def run() -> None:
        shapes = {"w": torch.Size((ROWS, COLUMNS))}
        average(GradBucket(shapes, flat.clone(), next(steps)), world.comm)

    return count(run, world)


def step_some(config: DictConfig) -> tuple[int, int]:
    """Return the same for one step of a strategy that moves more than gradients."""
    world = join()
    model, exchange = nn.Linear(COLUMNS, ROWS, bias=False), build(config.exchange)
    worker = make_worker(config.overlap, world.device, world.comm.backend, False)
    settings = config.overlap, config.bucket_mb
    sync = build(config.sync, SyncParts(model, model, exchange, world.comm, worker, *settings))

    optimizer = torch.optim.SGD(sync.optimized(model).parameters())

    def run() -> None:
        model.weight.grad = torch.randn(ROWS, COLUMNS)
        sync.finish()
        sync.update(optimizer)
        sync.after_update(last=False)

    answer = count(run, world)
    worker.close()
    return answer


def shard_some(config: DictConfig) -> tuple[int, int]:
    """Return the same for a step of FSDP, as its sync computes it."""
    world = join()
    square = COLUMNS, COLUMNS
    model = nn.Sequential(nn.Linear(*square, bias=False), nn.Linear(*square, bias=False))
    worker = make_worker(False, world.device, world.comm.backend, False)
    parts = SyncParts(model, model, build(config.exchange), world.comm, worker, True, 4)
    sync = build(config.sync, parts)

    def run() -> None:
        with sync.micro_batch(last=True):
            sync.module(torch.ones(2, COLUMNS)).sum().backward()
        sync.finish()

    return count(run, world)


def scatter_some() -> tuple[int, int]:
    """Return the same for a reduce-scatter of the matrix."""
    world = join()
    tensor = torch.randn(world.size, NUM_VALUES // world.size)
    output, parts = torch.empty_like(tensor[0]), torch.empty_like(tensor)
    return count(lambda: world.comm.ireduce_scatter(output, tensor, parts).wait(), world)


def loopback() -> int:
    sent = sent_bytes("lo")
    assert sent is not None
    return sent


def count(run: Callable[[], None], world: World) -> tuple[int, int]:
    """Return the payload of one `run` on this rank, and the bytes that crossed for all."""
    run()  # the first call connects
    sent, counted = world.comm.traffic.payload_bytes, list[int]()
    for _ in range(NUM_EXCHANGES):
        world.barrier()
        before = loopback()
        world.barrier()
        run()
        world.barrier()
        counted.append(loopback() - before)
    worlds.stop()
    # A busy machine makes TCP send a segment of 64 KB twice, now and then.
    return (world.comm.traffic.payload_bytes - sent) // NUM_EXCHANGES, median_low(counted)


def theory(exchange: str, size: int) -> float:
    """Return the bytes that the busiest rank sends for the matrix, by the exchange's card."""
    settings = exchange_settings(exchange, *COUNTED.get(exchange, ()))
    one_host = replace(LINKS, ranks_per_node=size, intra=LINKS.inter)
    return payload_bytes([(ROWS, COLUMNS)], settings, Network(one_host, size))


# On more ranks those whose ranks send different numbers of bytes.
CASES = [(exchange, 2) for exchange in REPEATABLE]
CASES += [(e, size) for e in ("allreduce", "tree", "tree_double", "onebit") for size in (3, 4)]


@pytest.mark.parametrize(("exchange", "size"), some_of(CASES, every=5))
def test_counted_bytes_are_those_that_crossed_and_the_cards(
    on_ranks: OnRanks, exchange: str, size: int
) -> None:
    config = load([f"exchange={exchange}", *COUNTED.get(exchange, ())])
    check(on_ranks(size, exchange_some, config), theory(exchange, size))


# Gradients and weights on the same path have the bytes of gradients and means.
STEPS = [("caffe", "tree", 3), ("torch7", "star", 2), ("tensorflow", "star", 2)]
STEPS += [("zero1", "allreduce", 4), ("zero1", "allreduce", 2)]


@pytest.mark.parametrize(("strategy", "exchange", "size"), some_of(STEPS, every=3))
def test_all_bytes_of_a_step_are_counted(
    on_ranks: OnRanks, strategy: str, exchange: str, size: int
) -> None:
    check(on_ranks(size, step_some, load([f"strategy={strategy}"])), theory(exchange, size))


# Two units, each gathered twice, and reduced by torch as an all-reduce or by the lab in half of it.
@pytest.mark.parametrize(
    ("settings", "size", "shares"),
    some_of(
        [
            ("sync.reduce_scatter=torch", 2, 4),
            ("sync.reduce_scatter=lab exchange=allreduce", 2, 3),
            ("sync.reduce_scatter=lab exchange=allreduce sync.shard_size=2", 4, 3 + 1),
            ("sync.reduce_scatter=lab exchange=allreduce sync.reshard=2", 4, 1.5 + 1 + 1.5),
            (
                "sync.all_gather=int8 sync.reshard=2 sync.reduce_scatter=lab exchange=int4",
                4,
                1.5 * 1032 / 4096 + 1 + 1.5 * 72 / 512,
            ),
        ],
        every=4,
    ),
)
def test_fsdp_sends_what_its_sync_computes(
    on_ranks: OnRanks, settings: str, size: int, shares: int
) -> None:
    part = 4 * 2 * COLUMNS**2 / 2
    config = load(["strategy=fsdp", *settings.split()])
    check(on_ranks(size, shard_some, config), part * shares)


def test_a_reduce_scatter_sends_each_part_once(on_ranks: OnRanks) -> None:
    check(on_ranks(3, scatter_some), 4 * NUM_VALUES * 2 / 3)


def check(answers: list[tuple[int, int]], expected: float) -> None:
    payloads = [payload for payload, _ in answers]
    counted = min(crossed for _, crossed in answers)  # all saw all bytes; one saw least noise
    assert max(payloads) == pytest.approx(expected, rel=0.05)
    assert sum(payloads) == pytest.approx(counted, rel=0.05)


def test_none_moves_nothing(on_ranks: OnRanks) -> None:
    none = load(["exchange=none"])
    assert all(payload == 0 for payload, _ in on_ranks(2, exchange_some, none))
