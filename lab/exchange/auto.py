"""Compression where it pays: a cost gate for each bucket."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lab.distributed.comm import Comm
from lab.exchange.base import Exchange
from lab.exchange.bucket import GradBucket
from lab.exchange.error_feedback import ErrorFeedback
from lab.measure.clock import Mark, mark, seconds


class Auto(Exchange):
    """Averages a bucket by whichever of two exchanges is faster here.

    From the second step on, when buckets have their final form, each is averaged by the one and by
    the other in turns, and timed: encoding, transfer and decoding, over the link at hand, beside
    what the machine does meanwhile. The first time of each does not count. Then the one with the
    shorter median stays, the slowest rank's time being what counts. The residual
    of a compressed exchange that is dropped is flushed in the next step.

    A resume keeps what was decided; before that, and on another number of ranks, it begins anew.
    Two runs may decide differently: this exchange is a matter of the clock.

    Args:
        compressed: an exchange that sends fewer bytes.
        plain: one that spends less on each.
        trials: timed steps for each of the two.

    Raises:
        ValueError: fewer than one trial, or an exchange that cannot have its place.
    """

    exact = False

    def __init__(self, compressed: Exchange, plain: Exchange, trials: int) -> None:
        if not isinstance(trials, int) or trials < 1:
            raise ValueError(f"exchange.trials={trials}: must be an integer of at least 1")
        if isinstance(plain, ErrorFeedback):
            name = type(plain).__name__
            raise ValueError(f"exchange.plain={name}: keeps residuals; make it exchange.compressed")
        for key, way in (("compressed", compressed), ("plain", plain)):
            if not way.keeps_replicas_equal:
                raise ValueError(f"exchange.{key}={type(way).__name__}: leaves the ranks apart")
        self.compressed, self.plain, self.trials = compressed, plain, trials
        self.needs_send_recv = compressed.needs_send_recv or plain.needs_send_recv
        self.needs_like_gpus = compressed.needs_like_gpus or plain.needs_like_gpus
        # By the name of a bucket's first parameter: medians of both ways, seconds, float64 [2].
        self.costs: dict[str, Tensor] = {}
        self._spans: dict[str, list[tuple[Mark, Mark]]] = {}

    def average(self, bucket: GradBucket, comm: Comm) -> None:
        name = next(iter(bucket.shapes))
        if name not in self.costs and bucket.step > 0:
            self._try(name, bucket, comm)
        elif name in self.costs and _compressed_wins(self.costs[name]):
            self.compressed.average(bucket, comm)
        else:
            self.compressed.flush_residual(bucket, comm)
            self.plain.average(bucket, comm)

    def _try(self, name: str, bucket: GradBucket, comm: Comm) -> None:
        spans = self._spans.setdefault(name, [])
        way = (self.compressed, self.plain)[len(spans) % 2]
        comm.all_reduce(bucket.flat.new_zeros(1))  # ranks that come late are no fault of either
        begin = mark(bucket.flat.device)
        way.average(bucket, comm)
        spans.append((begin, mark(bucket.flat.device)))
        if len(spans) == 2 * (self.trials + 1):
            self.costs[name] = self._slowest_medians(self._spans.pop(name), bucket, comm)

    def _slowest_medians(
        self, spans: list[tuple[Mark, Mark]], bucket: GradBucket, comm: Comm
    ) -> Tensor:
        device = bucket.flat.device
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # once for each bucket
        times = torch.tensor([seconds(*span) for span in spans], dtype=torch.float64)
        own = times.view(-1, 2)[1:].quantile(0.5, dim=0).to(device)
        everyones = own.new_empty(comm.size, 2)
        comm.all_gather(everyones, own)
        return everyones.amax(dim=0).cpu()

    def choices(self) -> list[dict[str, Any]]:
        """For each bucket: its first parameter, both costs, and the exchange that was chosen."""
        return [
            {
                "bucket": name,
                "compressed_s": float(cost[0]),
                "plain_s": float(cost[1]),
                "chosen": type(self.compressed if _compressed_wins(cost) else self.plain).__name__,
            }
            for name, cost in self.costs.items()
        ]

    def state_dict(self) -> dict[str, Any]:
        return {**self.compressed.state_dict(), "costs": dict(self.costs)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.compressed.load_state_dict(state)
        self.costs = {name: cost.cpu() for name, cost in state["costs"].items()}

    def redistribute(self, states: list[dict[str, Any]], rank: int, size: int) -> dict[str, Any]:
        return {**self.compressed.redistribute(states, rank, size), "costs": {}}


def _compressed_wins(cost: Tensor) -> bool:
    compressed_s, plain_s = cost.tolist()
    return compressed_s < plain_s
