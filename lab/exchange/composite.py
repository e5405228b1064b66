"""An exchange that is made of others, of which one averages a bucket at a time."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from lab.distributed.comm import Collective, Comm
from lab.exchange.base import Exchange, Kept, Ranks, Shapes, require_mean
from lab.exchange.bucket import GradBucket
from lab.exchange.cost import Needs, Sizes


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
            require_mean(f"{key}{name}", exchange)
        self.parts = dict(parts)
        self._keys = {name: f"{key}{name}".removeprefix("exchange") for name in parts}
        everyone = self.parts.values()
        self.dtypes = frozenset.intersection(*(exchange.dtypes for exchange in everyone))
        self.exact = all(exchange.exact for exchange in everyone)
        self.staged = all(exchange.staged for exchange in everyone)
        self.needs_send_recv = any(exchange.needs_send_recv for exchange in everyone)
        self.needs_like_gpus = any(exchange.needs_like_gpus for exchange in everyone)

    def left_exact(self, shapes: Shapes, key: str = "exchange") -> Iterator[tuple[int, str]]:
        for name, exchange in self.parts.items():
            yield from exchange.left_exact(shapes, f"{key}{self._keys[name]}")

    def made_of(self) -> Iterable[Exchange]:
        return self.parts.values()

    def memory_bytes(self, sizes: Sizes) -> Needs:
        """Return what the part in use needs that needs most."""
        kinds = {name: type(exchange).__name__ for name, exchange in self.parts.items()}
        used = [e for name, e in self.parts.items() if sizes.chosen & {name, kinds[name]}]
        needs = [e.memory_bytes(sizes) for e in used or self.parts.values()]
        return max(needs, key=lambda n: max(4 * sizes.gathered, n.scratch) + n.kept)

    @abstractmethod
    def choose(self, bucket: GradBucket, comm: Comm) -> str:
        """Return the name of the exchange for `bucket`; all ranks call this and agree."""

    def asynchronous(self, comm: Comm) -> bool:
        return all(exchange.asynchronous(comm) for exchange in self.parts.values())

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

    def check_reach(self, comm: Comm) -> None:
        for exchange in self.parts.values():
            exchange.check_reach(comm)

    def look_at(self, model: nn.Module) -> None:
        for exchange in self.parts.values():
            exchange.look_at(model)

    def add_residual(self, bucket: GradBucket, comm: Ranks) -> None:
        for exchange in self.parts.values():
            exchange.add_residual(bucket, comm)

    def flush_residual(self, bucket: GradBucket, comm: Ranks) -> None:
        for exchange in self.parts.values():
            exchange.flush_residual(bucket, comm)

    def kept(self, shapes: Shapes, comm: Comm) -> Iterator[Kept]:
        for exchange in self.parts.values():
            yield from exchange.kept(shapes, comm)

    def error_bound(self, largest: float, size: int) -> float:
        return max(exchange.error_bound(largest, size) for exchange in self.parts.values())

    def state_dict(self) -> dict[str, Any]:
        return {
            f"{name}.{kind}": tensors
            for name, exchange in self.parts.items()
            for kind, tensors in exchange.state_dict().items()
        }

    def continues(self, state: Mapping[str, Any]) -> bool:
        return all(e.continues(own) for name, e in self.parts.items() if (own := _of(name, state)))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, exchange in self.parts.items():
            if own := _of(name, state):
                exchange.load_state_dict(own)

    def redistribute(self, states: list[dict[str, Any]], rank: int, size: int) -> dict[str, Any]:
        return {
            f"{name}.{kind}": tensors
            for name, exchange in self.parts.items()
            if _of(name, states[0])
            for kind, tensors in exchange.redistribute(
                [_of(name, state) for state in states], rank, size
            ).items()
        }


def _of(name: str, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a state that belongs to the exchange `name`."""
    prefix = f"{name}."
    return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
