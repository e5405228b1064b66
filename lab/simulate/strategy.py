"""A way to exchange gradients, as the simulator sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lab.simulate.costs import card_of
from lab.simulate.phases import in_shares, phases_of
from lab.simulate.scatters import scatter_of
from lab.sync.pattern import Pattern, class_of, gradsync, pattern_of

NONE = {"_target_": "lab.exchange.none.NoExchange"}
EXACT = {"_target_": "lab.exchange.allreduce.AllReduce", "dtype": "float32"}


@dataclass(frozen=True)
class Strategy:
    """A way to exchange gradients.

    Attributes:
        exchange: `_target_` and its arguments, as configured.
        pattern: the pattern of the strategy's sync.
        accumulate: micro-batches of a step; gradients are exchanged in the last one.
        chunk_mb: size of buckets, and of parts of large parameters, where the next forward waits.
        tries: the run times steps in which it does not wait as well, and keeps the faster schedule.
    """

    exchange: Mapping[str, Any]
    bucket_mb: float | None = None
    pattern: Pattern = gradsync(overlap=False)
    accumulate: int = 1
    chunk_mb: float | None = None
    tries: bool = False

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
            _check_gathers(name, settings["sync"])
            scatter_of(exchange)
        for _, way in phases_of(exchange):
            card_of(way)
        strategy = cls(exchange, settings["bucket_mb"], pattern, settings["accumulate"])
        if not pattern.waits_in_forward:
            return strategy
        sync = settings["sync"]
        return replace(strategy, chunk_mb=sync["chunk_mb"], tries=sync["trials"] > 0)

    @property
    def lossy(self) -> bool:
        """True if ranks do not take every step with the mean of their gradients."""
        if self.pattern.by_library:
            return False
        late = self.pattern.outlasts_step
        return late or self.pattern.own_replicas or card_of(self.exchange).lossy(self.exchange)


def _check_gathers(name: str, sync: Mapping[str, Any]) -> None:
    """ValueError: a part of ZeRO++ is on, which has no cost model."""
    plain = {"all_gather": ("torch",), "reshard": (None,), "reduce_scatter": ("torch", "lab")}
    for key, allowed in plain.items():
        if sync[key] not in allowed:
            raise ValueError(f"{name}: sync.{key}={sync[key]} has no cost model")


CEILING = Strategy(NONE)
