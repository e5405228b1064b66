"""Targets of advice: the quantity by which options are ranked."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from lab.settings.errors import ConfigError

ALLOWED = "throughput, hours, efficiency>=SHARE or cost"
BOUND = re.compile(r"efficiency>=(.+)")
SECONDS = 3600  # of an hour
UNITS = ("device", "node")


@dataclass(frozen=True)
class Target:
    """The goal of a training.

    Attributes:
        text: as typed.
        least_efficiency: options below it are left out.
        samples: number of samples of one epoch; None: unknown.
        price_per_hour: of a `unit`, in any currency; None: unknown.
    """

    text: str = "throughput"
    least_efficiency: float = 0.0
    samples: float | None = None
    price_per_hour: float | None = None
    unit: str = "device"

    @classmethod
    def of(
        cls, text: str, samples: float | None, price_per_hour: float | None, unit: str
    ) -> Target:
        """Read a target as it is typed.

        Raises:
            ConfigError: there is none of that name, or it is cost without a price.
        """
        if text == "cost" and price_per_hour is None:
            raise ConfigError("target=cost: needs price_per_hour=, of a device (or price_of=node)")
        return cls(text, _least(text), samples, price_per_hour, unit)

    def units(self, world_size: int, ranks_per_node: int) -> int:
        """Return how many devices or nodes are paid for."""
        return world_size if self.unit == "device" else math.ceil(world_size / ranks_per_node)

    def weight(self, world_size: int, ranks_per_node: int) -> float:
        """Return what a second counts: one, or the devices or nodes if cost is the target."""
        return self.units(world_size, ranks_per_node) if self.text == "cost" else 1

    def total_samples(
        self, epochs: float | None, steps: int | None, batch_size: int
    ) -> float | None:
        """Return how many samples a run trains on; None if nothing says so."""
        if steps is not None:
            return steps * batch_size
        return None if self.samples is None else self.samples * (epochs or 1)

    def hours(self, seconds_per_sample: float, total: float | None) -> float | None:
        """Return the hours of a training on `total` samples."""
        return None if total is None else total * seconds_per_sample / SECONDS


def check_duration(target: Target, epochs: float | None, steps: int | None) -> None:
    """Refuse hours of a training of unknown length.

    Raises:
        ConfigError: neither samples nor steps are given.
    """
    if target.text == "hours" and target.total_samples(epochs, steps, 1) is None:
        given = "target=hours" if epochs is None else f"target=hours epochs={epochs:g}"
        raise ConfigError(f"{given}: needs samples=, the number of samples of one epoch; or steps=")


def _least(text: str) -> float:
    bound = BOUND.fullmatch(text)
    if bound:
        try:
            share = float(bound[1])
        except ValueError:
            share = math.nan
        if not 0 < share <= 1:
            raise ConfigError(f"target={text}: the efficiency must be above 0 and at most 1")
        return share
    if text == "efficiency":
        raise ConfigError(
            "target=efficiency: needs a bound, quoted for the shell: 'target=efficiency>=0.8'"
        )
    if text not in ("throughput", "hours", "cost"):
        raise ConfigError(f"target={text}: allowed are {ALLOWED}")
    return 0.0
