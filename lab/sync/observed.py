"""Observe an exchange: when it runs, and how much of that is the rank's own work."""

from __future__ import annotations

from collections.abc import Callable

from lab.distributed.comm import Comm
from lab.distributed.worker import Job, Worker
from lab.exchange.base import Exchange, Staged
from lab.measure.clock import Clock


def observed(
    clock: Clock | None, bucket: str, job: Job, exchange: Exchange, comm: Comm, worker: Worker
) -> Job:
    """Wrap `job`, the exchange of one bucket, so that `clock` records its times."""
    if clock is None:
        return job
    waited = _waited(clock, exchange, comm)
    return clock.traced(bucket, job, not exchange.exact, waited, worker.in_line)


def _waited(clock: Clock, exchange: Exchange, comm: Comm) -> Callable[[], float] | None:
    """Return a count of seconds waited within stages; None: waits cannot be told from work.

    In a stream, waits lie between the stages. Where an exchange has none, or Gloo carries tensors
    of GPUs, the stream's events do not tell when it idles.
    """
    if clock.on_gpu:
        return (lambda: 0.0) if comm.backend == "nccl" and isinstance(exchange, Staged) else None
    return lambda: comm.traffic.waited_s
