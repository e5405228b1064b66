"""The guard against host waits detects them anywhere in a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lab.distributed.comm import Collective, Comm, run_ranks
from lab.distributed.worker import InlineWorker
from lab.exchange.allreduce import AllReduce
from lab.exchange.bucket import GradBucket
from lab.sync.base import SyncParts
from lab.sync.gradsync import GradSync
from tests.support.guard import Guard

Deed = Callable[[Tensor], Any]
WAITS: dict[str, Deed] = {
    "item": lambda t: t[0].item(),
    "float": lambda t: float(t[0]),
    "bool": lambda t: bool(t[0]),
    "if": lambda t: 1 if t.isfinite().all() else 0,
    "index of a list": lambda t: [0, 1][(t[0] * 0).int()],
    "tolist": lambda t: t.tolist(),
    "numpy": lambda t: t.numpy(),
    "asarray": lambda t: np.asarray(t),
    "cpu": lambda t: t.cpu(),
    "to": lambda t: t.to("cpu"),
    "nonzero": lambda t: t.nonzero(),
    "mask": lambda t: t[t > 0],
    "put by mask": lambda t: t.clone().__setitem__(t > 0, t[0]),
    "tensor": lambda t: torch.tensor([1, 2]),
    "as_tensor": lambda t: torch.as_tensor([1, 2]),
    "new_tensor": lambda t: t.new_tensor([1, 2]),
    "read in the same step": lambda t: float(t[0].to("cpu", non_blocking=True)),
}
PASSES: dict[str, Deed] = {
    "arithmetic": lambda t: (t * 2 + 1).sum().isfinite(),
    "fill": lambda t: torch.full((), 0.5, device=t.device).masked_fill_(t[0] > 0, torch.nan),
    "index": lambda t: t[torch.from_numpy(np.array([1, 0]))],
    "slice": lambda t: t[1:],
    "copy": lambda t: t.to("cpu", non_blocking=True),
    "dtype": lambda t: t.to(torch.bfloat16),
}


class Doing(AllReduce):
    """An all-reduce that applies a function to its bucket between its stages."""

    def __init__(self, deed: Deed) -> None:
        super().__init__()
        self.deed = deed

    def stages(self, bucket: GradBucket, comm: Comm) -> Iterator[Collective]:
        yield from super().stages(bucket, comm)
        self.deed(bucket.flat)


def nothing(_tensor: Tensor) -> None: ...


def calls(in_hook: Deed, in_stage: Deed) -> list[str]:
    """List the waiting calls in a step of two ranks, as recorded on the first."""

    def rank_main(comm: Comm) -> list[str]:
        net = nn.Linear(4, 2)

        def hook(parameter: Tensor) -> None:
            in_hook(parameter.detach().view(-1))

        net.weight.register_post_accumulate_grad_hook(hook)
        exchange, worker = Doing(in_stage), InlineWorker()
        sync = GradSync(SyncParts(net, net, exchange, comm, worker, overlap=True))
        with sync, Guard() as guard, guard.step():
            with sync.micro_batch(last=True):
                net(torch.ones(3, 4)).sum().backward()
            sync.finish()
        assert all(
            wait.place.startswith("tests/unit/conventions/test_guard.py") for wait in guard.waits
        )
        return [str(wait) for wait in guard.waits]

    return run_ranks(2, rank_main)[0]


@pytest.mark.parametrize("name", WAITS)
def test_what_waits_is_seen_in_a_hook_and_in_a_stage_of_an_exchange(name: str) -> None:
    line = WAITS[name].__code__.co_firstlineno
    for found in (calls(WAITS[name], nothing), calls(nothing, WAITS[name])):
        assert found and found[0].startswith(
            f"tests/unit/conventions/test_guard.py:{line} in <lambda>: "
        )


@pytest.mark.parametrize("name", PASSES)
def test_what_does_not_wait_passes(name: str) -> None:
    assert calls(PASSES[name], PASSES[name]) == []


def test_a_copy_may_be_read_a_step_later_and_anything_between_steps() -> None:
    value = torch.ones(())
    with Guard() as guard:
        before = value.cpu()
        with guard.step():
            assert before.tolist() == 1
            copy = value.to("cpu", non_blocking=True)
        assert value.item() == 1
        with guard.step():
            assert float(copy) == 1
    assert guard.waits == []
