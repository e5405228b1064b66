"""Several exchanges, of which one averages a bucket at a time; Schedule takes one after another."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from lab.distributed.comm import Collective, Comm
from lab.exchange.base import Exchange, Shapes, require_part
from lab.exchange.bucket import GradBucket
from lab.exchange.cost import Costs, Needs, Sizes
from lab.exchange.grouping import checked_ends


class Composite(Exchange):
    """Several exchanges, of which each bucket of each step has one.

    Nothing is lost at a switch: residuals that other exchanges have kept join the gradient, so
    delivered + residuals = true gradients at any time.

    Args:
        parts: the exchanges by name.
        key: names them in messages, in front of a part's own name.

    Raises:
        ValueError: one of them does not average.
    """

    def __init__(self, parts: Mapping[str, Exchange], key: str) -> None:
        for name, exchange in parts.items():
            require_part(f"{key}{name}", exchange)
        self.parts = dict(parts)
        self._keys = {name: f"{key}{name}".removeprefix("exchange") for name in parts}
        all_parts = self.parts.values()
        self.dtypes = frozenset.intersection(*(exchange.dtypes for exchange in all_parts))
        self.exact = all(exchange.exact for exchange in all_parts)
        self.staged = all(exchange.staged for exchange in all_parts)
        self.needs_send_recv = any(exchange.needs_send_recv for exchange in all_parts)
        self.needs_like_gpus = any(exchange.needs_like_gpus for exchange in all_parts)

    @abstractmethod
    def choose(self, bucket: GradBucket, comm: Comm) -> str:
        """Return the name of the exchange for `bucket`; all ranks call this and agree."""

    def children(self) -> Iterable[Exchange]:
        return self.parts.values()

    def average(self, bucket: GradBucket, comm: Comm) -> None:
        self.switch(self.choose(bucket, comm), bucket, comm).average(bucket, comm)

    def stages(self, bucket: GradBucket, comm: Comm) -> Iterator[Collective]:
        yield from self.switch(self.choose(bucket, comm), bucket, comm).stages(bucket, comm)

    def switch(self, name: str, bucket: GradBucket, comm: Comm) -> Exchange:
        """Return the exchange `name`, once the others' residuals are in the bucket."""
        current = self.parts[name]
        for exchange in self.parts.values():
            if exchange is not current:
                exchange.flush_residual(bucket, comm)
        return current

    def validate(self, comm: Comm) -> None:
        for exchange in self.parts.values():
            exchange.validate(comm)

    def memory_bytes(self, sizes: Sizes) -> Needs:
        """Return what the part in use needs that needs most."""
        kinds = {name: type(exchange).__name__ for name, exchange in self.parts.items()}
        used = [e for name, e in self.parts.items() if sizes.chosen & {name, kinds[name]}]
        needs = [e.memory_bytes(sizes) for e in used or self.parts.values()]
        return max(needs, key=lambda n: max(4 * sizes.gathered, n.scratch) + n.kept)

    def left_exact(self, shapes: Shapes, key: str = "exchange") -> Iterator[tuple[int, str]]:
        for name, exchange in self.parts.items():
            yield from exchange.left_exact(shapes, f"{key}{self._keys[name]}")

    def state_dict(self) -> dict[str, Any]:
        return _joined({name: exchange.state_dict() for name, exchange in self.parts.items()})

    def continues(self, state: Mapping[str, Any]) -> bool:
        return all(e.continues(own) for name, e in self.parts.items() if (own := _of(name, state)))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, exchange in self.parts.items():
            if own := _of(name, state):
                exchange.load_state_dict(own)

    def redistribute(self, states: list[dict[str, Any]], rank: int, size: int) -> dict[str, Any]:
        of_parts = {name: [_of(name, state) for state in states] for name in self.parts}
        return _joined(
            {
                name: self.parts[name].redistribute(own, rank, size)
                for name, own in of_parts.items()
                if own[0]
            }
        )


def _joined(states: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {f"{name}.{kind}": kept for name, own in states.items() for kind, kept in own.items()}


def _of(name: str, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a joined state that belongs to the exchange `name`."""
    prefix = f"{name}."
    return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}


class Schedule(Composite):
    """Two or three exchanges, each for a part of the run: exactly first, compressed later.

    Args:
        first, second, third: the exchanges in their order; `third` may be None.
        until: where all but the last end: shares of the run between 0 and 1, or numbers of steps.
            A share of a run that is resumed with another length is one of the new length.

    Raises:
        ValueError: `until` does not fit the exchanges, or one of these does not average.
    """

    def __init__(
        self, first: Exchange, second: Exchange, third: Exchange | None, until: Sequence[float]
    ) -> None:
        named = {"first": first, "second": second, "third": third}
        phases = {name: exchange for name, exchange in named.items() if exchange is not None}
        super().__init__(phases, "exchange.")
        self.until = checked_ends(until, len(phases))

    def add_cost(self, costs: Costs) -> bool:
        """Add each phase's stages for its share of the run."""
        if not all(0 < end < 1 for end in self.until):
            raise ValueError(
                f"exchange.until={self.until}: a prediction needs the run's length; set steps, or "
                "give fractions of the run"
            )
        spans = pairwise([0, *self.until, 1])
        for exchange, (start, end) in zip(self.parts.values(), spans, strict=True):
            costs.add(exchange, share=end - start)
        return True

    def choose(self, bucket: GradBucket, comm: Comm) -> str:
        """Return the phase of the bucket's step."""
        return list(self.parts)[sum(end <= bucket.step for end in self._ends())]

    def _ends(self) -> list[int]:
        """Return the step that follows each phase but the last.

        Raises:
            ValueError: `until` has shares of a run of unknown length.
        """
        if all(isinstance(end, int) for end in self.until):
            return [int(end) for end in self.until]
        if self.total_steps is None:
            raise ValueError(
                f"exchange.until={self.until}: your own loop has no known length; "
                "give numbers of steps"
            )
        return [round(end * self.total_steps) for end in self.until]

    def choices(self) -> list[dict[str, Any]]:
        """Return for each phase its exchange and steps, and then what the exchanges chose."""
        spans = pairwise([0, *self._ends(), None])
        phases = [
            {"chosen": type(exchange).__name__, "first_step": start, "end_step": end}
            for exchange, (start, end) in zip(self.parts.values(), spans, strict=True)
        ]
        return phases + super().choices()
