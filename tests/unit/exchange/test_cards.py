"""Every exchange of conf/exchange against its own card, as threads of this process."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from lab.distributed.comm import Comm, Completed, Transfer, run_ranks
from lab.exchange.bucket import GradBucket, Plans
from lab.exchange.cost import Sizes
from lab.settings.config import build, load
from lab.simulate.costs import extra_bytes, payload_bytes
from lab.simulate.network import Network
from tests.support.cases import (
    EXCHANGES,
    LINKS,
    REPEATABLE,
    STEADY,
    TEMPORARIES,
    exchange_settings,
    maker,
)
from tests.support.slow import some_of

SHAPE = torch.Size((384, 2048))  # 2, 3, 4 and 8 ranks share it equally, in whole lines of a message


def exchange_once(exchange: str, size: int) -> tuple[list[torch.Tensor], int]:
    """Return each rank's result, and the bytes that the busiest rank sent.

    It is the second step that counts.
    """
    node = load([f"exchange={exchange}", *STEADY.get(exchange, ())]).exchange  # not in a thread
    gradients = [torch.randn(SHAPE.numel()) for _ in range(size)]

    def rank_main(comm: Comm) -> tuple[torch.Tensor, int]:
        made, gradient = build(node), gradients[comm.rank]
        buckets = [GradBucket({"w": SHAPE}, gradient.clone(), step) for step in (0, 1)]
        for bucket in buckets:
            comm.traffic.payload_bytes = 0
            made.average(bucket, comm)
        return buckets[-1].flat, comm.traffic.payload_bytes

    means, payloads = zip(*run_ranks(size, rank_main), strict=True)
    return list(means), max(payloads)


@pytest.mark.parametrize("size", some_of([1, 2, 3, 4, 8], also=[3]))
@pytest.mark.parametrize("exchange", REPEATABLE)
def test_sends_what_its_card_says_and_leaves_all_ranks_the_same(exchange: str, size: int) -> None:
    means, payload = exchange_once(exchange, size)
    settings = exchange_settings(exchange, *STEADY.get(exchange, ()))
    expected = payload_bytes([tuple(SHAPE)], settings, Network(LINKS, size))
    assert payload == pytest.approx(expected, rel=0.01, abs=64)
    assert all(torch.equal(mean, means[0]) for mean in means)


class EchoComm(Comm):
    """One of `size` ranks, the others of which say what it says; allocates nothing."""

    backend = "threads"

    def _iall_reduce(self, tensor: torch.Tensor) -> Completed:
        tensor *= self.size
        return Completed()

    def _iall_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> Completed:
        output.view(self.size, *tensor.shape).copy_(tensor.expand(self.size, *tensor.shape))
        return Completed()

    def _iall_to_all(self, output: torch.Tensor, tensor: torch.Tensor) -> Completed:
        output.copy_(tensor)
        return Completed()

    def _ibroadcast(self, tensor: torch.Tensor, source: int) -> Completed:
        return Completed()

    def _isend_irecv(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> Completed:
        for tensor, _ in receives:
            tensor.zero_()
        return Completed()


def allocated_bytes(make: Callable[[], Any], rank: int, size: int, trace: Path) -> int:
    """The most that a rank has allocated for its exchange at once, in three steps of a bucket."""
    flat, plans = torch.randn(SHAPE.numel()), Plans()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        exchange = make()
        for step in range(3):
            bucket = GradBucket({"w": SHAPE}, flat, step, plans=plans)
            exchange.average(bucket, EchoComm(rank, size))
    profiler.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    changes = [event for event in events if event["name"] == "[memory]"]
    changes.sort(key=lambda event: event["ts"])
    return max(accumulate((event["args"]["Bytes"] for event in changes), initial=0))


@pytest.mark.parametrize(("rank", "size"), some_of([(0, 2), (1, 2), (1, 4)], also=[(0, 2), (1, 4)]))
@pytest.mark.parametrize("exchange", some_of(EXCHANGES, every=3))
def test_allocates_what_its_card_says(exchange: str, rank: int, size: int, tmp_path: Path) -> None:
    n = SHAPE.numel()
    settings = exchange_settings(exchange, *STEADY.get(exchange, ()))
    card = extra_bytes(Sizes(n, 0, n, rank, size), settings)
    chosen = [setting.removeprefix("exchange.") for setting in STEADY.get(exchange, ())]
    small = 4096  # scalars, and lines of messages that are filled up
    trials = (
        allocated_bytes(maker(exchange, *chosen), rank, size, tmp_path / f"trace{trial}.json")
        for trial in range(3)  # the profiler loses events on a busy machine
    )
    peak = next((peak for peak in trials if peak >= 0.98 * card - small), 0)
    assert 0.98 * card - small <= peak <= 1.02 * TEMPORARIES.get(exchange, 1) * card + small


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_memory_grows_with_the_model_and_holds_gathered_gradients(exchange: str) -> None:
    settings = exchange_settings(exchange)
    for rank in range(3):
        small, large = (
            extra_bytes(Sizes(n, n // 2, n // 4, rank, 3), settings) for n in (10**6, 10**7)
        )
        assert 4 * 10**6 // 2 <= small < large
