"""One exchange after another over a run: exactly first, compressed later."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from lab.distributed.collective import Collective
from lab.distributed.comm import Comm
from lab.exchange.base import Exchange, Kept, Ranks, Shapes, require_mean
from lab.exchange.bucket import GradBucket

KEYS = ("first", "second", "third")


class Schedule(Exchange):
    """Two or three exchanges, each for a part of the run.

    At a switch nothing is lost: the residuals that the last exchange has kept join the gradients of
    the next step, so delivered + residuals = true gradients at any time.

    Args:
        first, second, third: the exchanges in their order; `third` may be None.
        until: where all but the last end: shares of the run between 0 and 1, or numbers of steps.
            A share of a run that is resumed with another length is one of the new length.

    Raises:
        ValueError: `until` does not fit the exchanges, or one of these does not average.
    """

    def __init__(
        self,
        first: Exchange,
        second: Exchange,
        third: Exchange | None,
        until: Sequence[float],
    ) -> None:
        named = {"first": first, "second": second, "third": third}
        self.phases = {key: exchange for key, exchange in named.items() if exchange is not None}
        for key, exchange in self.phases.items():
            require_mean(f"exchange.{key}", exchange)
        check_until(until, len(self.phases))
        self.until = list(until)
        everyone = self.phases.values()
        self.exact = all(exchange.exact for exchange in everyone)
        self.needs_send_recv = any(exchange.needs_send_recv for exchange in everyone)
        self.needs_like_gpus = any(exchange.needs_like_gpus for exchange in everyone)

    def asynchronous(self, comm: Comm) -> bool:
        return all(exchange.asynchronous(comm) for exchange in self.phases.values())

    def average(self, bucket: GradBucket, comm: Comm) -> None:
        self._switched(bucket, comm).average(bucket, comm)

    def stages(self, bucket: GradBucket, comm: Comm) -> Iterator[Collective]:
        yield from self._switched(bucket, comm).stages(bucket, comm)

    def check_reach(self, comm: Comm) -> None:
        for exchange in self.phases.values():
            exchange.check_reach(comm)

    def continues(self, state: Mapping[str, Any]) -> bool:
        return all(e.continues(own) for key, e in self.phases.items() if (own := _of(key, state)))

    def _switched(self, bucket: GradBucket, comm: Comm) -> Exchange:
        """Return the exchange of a bucket's step, once the others' residuals are in the bucket."""
        number = sum(end <= bucket.step for end in self._ends())
        current = [*self.phases.values()][number]
        for exchange in self.phases.values():
            if exchange is not current:
                exchange.flush_residual(bucket, comm)
        return current

    def _ends(self) -> list[int]:
        """Return the step that follows each phase but the last.

        Raises:
            ValueError: `until` has shares of a run of unknown length.
        """
        if all(isinstance(end, int) for end in self.until):
            return [int(end) for end in self.until]
        if self.total_steps is None:
            raise ValueError(
                f"exchange.until={self.until}: a loop of your own has no length; must be steps"
            )
        return [round(end * self.total_steps) for end in self.until]

    def add_residual(self, bucket: GradBucket, comm: Ranks) -> None:
        for exchange in self.phases.values():
            exchange.add_residual(bucket, comm)

    def flush_residual(self, bucket: GradBucket, comm: Ranks) -> None:
        for exchange in self.phases.values():
            exchange.flush_residual(bucket, comm)

    def kept(self, shapes: Shapes, comm: Comm) -> Iterator[Kept]:
        for exchange in self.phases.values():
            yield from exchange.kept(shapes, comm)

    def error_bound(self, largest: float, size: int) -> float:
        return max(exchange.error_bound(largest, size) for exchange in self.phases.values())

    def parts(self) -> Iterable[Exchange]:
        return self.phases.values()

    def choices(self) -> list[dict[str, Any]]:
        """Return for each phase its exchange and steps, and then what the exchanges chose."""
        ends = self._ends()
        spans = zip([0, *ends], [*ends, None], strict=True)
        phases = [
            {"chosen": type(exchange).__name__, "first_step": start, "end_step": end}
            for exchange, (start, end) in zip(self.phases.values(), spans, strict=True)
        ]
        return phases + [choice for e in self.phases.values() for choice in e.choices()]

    def state_dict(self) -> dict[str, Any]:
        return {
            f"{key}.{kind}": tensors
            for key, exchange in self.phases.items()
            for kind, tensors in exchange.state_dict().items()
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for key, exchange in self.phases.items():
            if own := _of(key, state):
                exchange.load_state_dict(own)

    def redistribute(self, states: list[dict[str, Any]], rank: int, size: int) -> dict[str, Any]:
        return {
            f"{key}.{kind}": tensors
            for key, exchange in self.phases.items()
            if _of(key, states[0])
            for kind, tensors in exchange.redistribute(
                [_of(key, state) for state in states], rank, size
            ).items()
        }


def _of(key: str, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a state that belongs to the exchange `key`."""
    prefix = f"{key}."
    return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}


def check_until(until: Any, num_phases: int) -> None:
    """Refuse ends of phases that are not one fewer than the phases, in order, and of one kind.

    Raises:
        ValueError: they are not.
    """
    ends = list(until) if isinstance(until, Sequence) and not isinstance(until, str) else []
    steps = all(type(end) is int and end >= 1 for end in ends)
    shares = all(type(end) is float and 0 < end < 1 for end in ends)
    ordered = (steps or shares) and sorted(set(ends)) == ends
    if len(ends) != num_phases - 1 or not ordered:
        raise ValueError(
            f"exchange.until={until}: must be {num_phases - 1} rising numbers, for {num_phases} "
            "exchanges: shares of the run between 0 and 1, or whole steps of at least 1"
        )
