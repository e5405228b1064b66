"""Compress only the buckets where measured time shows that it pays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from lab.distributed.comm import Comm
from lab.exchange.base import Exchange, Kept, Ranks, Shapes, require_mean
from lab.exchange.bucket import GradBucket
from lab.measure.marks import Mark, mark, seconds


class Auto(Exchange):
    """The faster of two exchanges, chosen for each bucket by measurement.

    From the second step on, when the buckets are final, the two exchanges average each bucket
    alternately and are timed: encoding, transfer and decoding, on the actual link and under the
    actual load. The first trial of each is discarded. Then the exchange with the shorter median is
    kept; the slowest rank's median counts. If the compressed exchange loses, its residual is
    flushed in the next step.

    A resumed run keeps the choices. Undecided buckets and another number of ranks start new trials.
    Choices depend on timing, so two runs may differ.

    Args:
        compressed: an exchange that sends fewer bytes.
        plain: an exchange that spends less time per byte.
        trials: timed steps for each of the two.

    Raises:
        ValueError: fewer than one trial, or an exchange that cannot be used in this role.
    """

    exact = False

    def __init__(self, compressed: Exchange, plain: Exchange, trials: int) -> None:
        if not isinstance(trials, int) or trials < 1:
            raise ValueError(f"exchange.trials={trials}: must be an integer of at least 1")
        if plain.state_dict():
            name = type(plain).__name__
            raise ValueError(f"exchange.plain={name}: keeps residuals; make it exchange.compressed")
        for key, exchange in (("compressed", compressed), ("plain", plain)):
            require_mean(f"exchange.{key}", exchange)
        self.compressed, self.plain, self.trials = compressed, plain, trials
        self.needs_send_recv = compressed.needs_send_recv or plain.needs_send_recv
        self.needs_like_gpus = compressed.needs_like_gpus or plain.needs_like_gpus
        # Median seconds of both exchanges, float64 [2], by the bucket's first parameter.
        self.costs: dict[str, Tensor] = {}
        self._spans: dict[str, list[tuple[Mark, Mark]]] = {}

    def parts(self) -> Iterable[Exchange]:
        return self.compressed, self.plain

    def check_reach(self, comm: Comm) -> None:
        super().check_reach(comm)
        self.compressed.check_reach(comm)
        self.plain.check_reach(comm)

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
        exchange = (self.compressed, self.plain)[len(spans) % 2]
        comm.all_reduce(bucket.flat.new_zeros(1))  # wait for late ranks, so that neither is charged
        begin = mark(bucket.flat.device)
        exchange.average(bucket, comm)
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
        medians = times.view(-1, 2)[1:].quantile(0.5, dim=0).to(device)
        all_medians = medians.new_empty(comm.size, 2)
        comm.all_gather(all_medians, medians)
        return all_medians.amax(dim=0).cpu()

    def add_residual(self, bucket: GradBucket, comm: Ranks) -> None:
        self.compressed.add_residual(bucket, comm)

    def flush_residual(self, bucket: GradBucket, comm: Ranks) -> None:
        self.compressed.flush_residual(bucket, comm)

    def kept(self, shapes: Shapes, comm: Comm) -> Iterator[Kept]:
        yield from self.compressed.kept(shapes, comm)

    def error_bound(self, largest: float, size: int) -> float:
        return max(each.error_bound(largest, size) for each in (self.compressed, self.plain))

    def choices(self) -> list[dict[str, Any]]:
        """Return for each bucket its first parameter, both costs and the chosen exchange."""
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

    def continues(self, state: Mapping[str, Any]) -> bool:
        return self.compressed.continues(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.compressed.load_state_dict(state)
        self.costs = {name: cost.cpu() for name, cost in state["costs"].items()}

    def redistribute(self, states: list[dict[str, Any]], rank: int, size: int) -> dict[str, Any]:
        return {**self.compressed.redistribute(states, rank, size), "costs": {}}


def _compressed_wins(cost: Tensor) -> bool:
    compressed_s, plain_s = cost.tolist()
    return compressed_s < plain_s
