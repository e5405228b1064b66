"""A way to exchange gradients, as the simulator sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from lab.simulate.costs import exchange_of
from lab.simulate.phases import in_shares, phases_of
from lab.simulate.scatters import scatter_of
from lab.sync.pattern import Pattern, class_of, gradsync, pattern_of

NONE = {"_target_": "lab.exchange.allreduce.NoExchange"}
EXACT = {"_target_": "lab.exchange.allreduce.AllReduce", "dtype": "float32"}


@dataclass(frozen=True)
class Sharding:
    """How FSDP2's units are gathered and scattered; see lab.sync.fsdp. The defaults are torch's."""

    all_gather: str = "torch"
    reshard: int | str | None = None
    reduce_scatter: str = "torch"

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Sharding:
        """Read a run's settings, of which earlier versions had fewer.

        Raises:
            ValueError: there is no such gather or scatter, or parts that exclude each other.
        """
        sync = settings["sync"]
        found = cls(**{key: sync[key] for key in asdict(cls()) if key in sync})
        _check("all_gather", found.all_gather, "torch", "int8")
        _check("reduce_scatter", found.reduce_scatter, "torch", "lab", "two_levels")
        if found.reshard is not None and sync["shard_size"] is not None:
            raise ValueError(
                f"sync.reshard={found.reshard}: sync.shard_size={sync['shard_size']} gathers "
                "within groups already"
            )
        keeps = settings["exchange"].get("error_feedback", False)
        if found.reduce_scatter == "two_levels" and keeps:
            raise ValueError(
                "exchange.error_feedback=true: sync.reduce_scatter=two_levels keeps no residuals"
            )
        return found


@dataclass(frozen=True)
class Strategy:
    """A way to exchange gradients.

    Attributes:
        exchange: `_target_` and its arguments, as configured.
        pattern: the pattern of the strategy's sync.
        accumulate: micro-batches of a step; gradients are exchanged in the last one.
        chunk_mb: size of buckets, and of parts of large parameters, where the next forward waits.
        tries: the run times steps in which it does not wait as well, and keeps the faster schedule.
        sharding: of a pattern that gathers units.
    """

    exchange: Mapping[str, Any]
    bucket_mb: float | None = None
    pattern: Pattern = gradsync(overlap=False)
    accumulate: int = 1
    chunk_mb: float | None = None
    tries: bool = False
    sharding: Sharding = Sharding()

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Strategy:
        """Read the strategy from a run's composed settings.

        Raises:
            ValueError: the strategy has no cost model.
        """
        pattern = pattern_of(settings)
        name = f"strategy={settings['strategy']}"
        if pattern.by_library and not pattern.gathers_units:
            sync = class_of(settings)
            raise ValueError(f"{name}: {sync} keeps its own schedule, which has no cost model")
        if settings["transform"]:
            raise ValueError(f"{name}: changes the model: give the profile of that, transform=none")
        exchange = in_shares(settings["exchange"], settings["steps"])
        if pattern.gathers_units:
            scatter_of(exchange)
            return cls(
                exchange,
                settings["bucket_mb"],
                pattern,
                settings["accumulate"],
                sharding=Sharding.of(settings),
            )
        for _, way in phases_of(exchange):
            exchange_of(way)
        strategy = cls(exchange, settings["bucket_mb"], pattern, settings["accumulate"])
        if not pattern.waits_in_forward:
            return strategy
        sync = settings["sync"]
        return replace(strategy, chunk_mb=sync["chunk_mb"], tries=sync["trials"] > 0)

    @property
    def lossy(self) -> bool:
        """True if ranks do not take every step with the mean of their gradients."""
        if self.sharding.all_gather != "torch":  # gradients at rounded weights
            return True
        if self.pattern.by_library:
            return False
        late = self.pattern.outlasts_step
        return late or self.pattern.own_replicas or not exchange_of(self.exchange).exact


def _check(key: str, value: object, *allowed: str) -> None:
    if value not in allowed:
        raise ValueError(f"sync.{key}={value}: allowed are {', '.join(allowed)}")


CEILING = Strategy(NONE)
