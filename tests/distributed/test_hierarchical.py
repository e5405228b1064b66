"""Both levels of a hierarchy over Gloo, under way for several buckets at a time."""

from __future__ import annotations

import time
from functools import partial

import pytest
import torch

from lab.distributed.worker import InlineWorker, Worker, make_worker
from lab.distributed.world import stop
from lab.exchange.bucket import GradBucket
from lab.exchange.hierarchical import Hierarchical
from lab.settings.config import build, load
from tests.support.ranks import join, spawn

NODES = {"2x2": [[0, 1], [2, 3]], "1+3": [[0], [1, 2, 3]]}
NUM_BUCKETS, NUM_STEPS = 4, 3
SHAPE = torch.Size((64, 256))


def exchange(inter: str, nodes: list[list[int]], in_turns: bool) -> list[torch.Tensor]:
    """Return the means of all buckets and steps, whose stages ranks reach at different moments."""
    world = join()
    comm = world.comm
    comm.nodes = nodes
    hierarchical = Hierarchical(build(load([f"exchange={inter}"]).exchange))
    hierarchical.validate(comm)
    assert hierarchical.asynchronous(comm)
    worker: Worker = InlineWorker()
    if in_turns:
        worker = make_worker(True, world.device, comm.backend, asynchronous=True)
    means = []
    for step in range(NUM_STEPS):
        for number in range(NUM_BUCKETS):
            generator = torch.Generator().manual_seed(100 * step + 10 * number + comm.rank)
            flat = torch.randn(SHAPE.numel(), generator=generator)
            bucket = GradBucket({f"w{number}": SHAPE}, flat, step)
            worker.submit(f"bucket {number}", partial(hierarchical.stages, bucket, comm))
            time.sleep(0.002 * ((comm.rank + number) % 3))
            worker.advance()
            means.append(flat)
        worker.wait()
    stop()
    return means


@pytest.mark.slow
@pytest.mark.parametrize("nodes", NODES.values(), ids=NODES)
def test_overlapping_levels_leave_the_same_bits(nodes: list[list[int]]) -> None:
    in_line, *_ = spawn(4, exchange, "onebit", nodes, False)
    for means in spawn(4, exchange, "onebit", nodes, True):
        for mean, expected in zip(means, in_line, strict=True):
            assert torch.equal(mean, expected)
