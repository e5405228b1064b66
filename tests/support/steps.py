"""Syncs of ranks that are threads, and the steps that they take as the trainer has them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from lab.distributed.comm import Comm
from lab.distributed.worker import InlineWorker, Worker
from lab.exchange.allreduce import AllReduce
from lab.exchange.base import Exchange
from lab.sync.base import Sync, SyncParts

S = TypeVar("S", bound=Sync)
OF_RUN = ("overlap", "bucket_mb", "precision")


def made(
    kind: Callable[..., S],
    model: nn.Module,
    comm: Comm,
    exchange: Exchange | None = None,
    worker: Worker | None = None,
    **settings: Any,
) -> S:
    """Return a sync of `kind`, with an exact exchange, run where it is submitted, if None is given.

    Args: settings: those OF_RUN, and the sync's own.
    """
    of_run = {key: settings.pop(key) for key in OF_RUN if key in settings}
    exchange, worker = exchange or AllReduce(), worker or InlineWorker()
    return kind(SyncParts(model, model, exchange, comm, worker, **of_run), **settings)


def squares(outputs: Tensor) -> Tensor:
    return outputs.square().mean()


def take_steps(
    sync: Sync,
    optimizer: Optimizer,
    inputs: Callable[[int], Tensor],
    steps: Iterable[int],
    *,
    last: int | None = None,
    loss: Callable[[Tensor], Tensor] = squares,
    before_update: Callable[[], object] = lambda: None,
) -> None:
    """Take steps, in a sync that was entered, on a rank's inputs; all must be finite.

    Args:
        last: the run's last step; None: it is none of these.
    """
    for step in steps:
        with sync.micro_batch(last=True):
            (loss(sync.module(inputs(step))) * sync.loss_factor).backward()
        found = [sync.finish()]
        before_update()
        sync.update(optimizer)
        found.append(sync.after_update(last=step == last))
        assert all(finite is None or finite for finite in found)
