"""Describe a paper's claims, one by one."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lab.claims.benched import BENCHED
from lab.claims.device import COUNTED, SWEPT, DevicePaper, Quantity, difference, ratio
from lab.claims.metrics import QUANTITIES, ClaimPoint, Facts, Missing
from lab.measure.statistics import Interval
from lab.record.schema import check_types
from lab.settings import checks

# Where a claim comes from; what it is worth follows from its value (lab/claims/findings.py).
ROLES = {
    "statement": "the source says it",
    "input": "its figure was put into the model or the study",
    "own": "the lab's own, which the source does not say",
}
DEVICES = ("cpu", "gpu")
OUTCOMES = ("holds", "fails", "within noise", "unknown")
OF_DEVICE: Mapping[str, Quantity] = {**COUNTED, **BENCHED, **SWEPT}


@dataclass(frozen=True)
class Bounds:
    """A condition on a value: within a share of `about`, `at_least` or `at_most`."""

    about: float | None = None
    within: float | None = None
    at_least: float | None = None
    at_most: float | None = None

    def __post_init__(self) -> None:
        bounds = (self.about, self.at_least, self.at_most)
        one_bound = sum(bound is not None for bound in bounds) == 1
        if not one_bound or (self.about is None) != (self.within is None):
            raise ValueError(
                "must give exactly one bound: 'at_least', 'at_most', or 'about' together "
                "with 'within'"
            )
        for key, value in vars(self).items():
            if value is not None:
                checks.number(f"check.{key}", value, 0 if key == "within" else None)

    @property
    def allowed(self) -> tuple[float, float]:
        """The smallest and the largest value that the condition allows."""
        if self.about is not None and self.within is not None:
            margin = self.within * abs(self.about)
            return self.about - margin, self.about + margin
        low = -math.inf if self.at_least is None else self.at_least
        return low, math.inf if self.at_most is None else self.at_most

    def outcome(self, value: Interval) -> str:
        """Judge a value by its interval, or by itself if it has none: one of OUTCOMES."""
        if math.isnan(value.mid):
            return "unknown"
        lo, hi = (value.mid, value.mid) if math.isnan(value.lo) else (value.lo, value.hi)
        least, most = self.allowed
        if least <= lo and hi <= most:
            return "holds"
        return "fails" if hi < least or lo > most else "within noise"

    def __str__(self) -> str:
        if self.about is not None and self.within is not None:
            return f"{self.about:.4g} ± {100 * self.within:g} %"
        return f"≥ {self.at_least:.4g}" if self.at_least is not None else f"≤ {self.at_most:.4g}"


@dataclass(frozen=True)
class Claim:
    """One sentence or label of a paper.

    Attributes:
        says: the sentence itself.
        source: its page, slide or label.
        role: a key of ROLES.
        quantity: a key of lab.claims.metrics.QUANTITIES, or for one device of OF_DEVICE.
        at: the point where the quantity is taken.
        published: the figure in the sentence; None if there is none.
        arguments: of a quantity of one device, which has no point.
        less, over: arguments that differ elsewhere: the value there is subtracted, or divides.
        grid: the cells of a statement over many, a quantity of OVER_GRID.
        conditions: what the source leaves open, or does otherwise than this lab.
    """

    says: str
    source: str
    quantity: str
    check: Bounds
    role: str = "statement"
    at: ClaimPoint = field(default_factory=ClaimPoint)
    published: float | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any], hash=False)
    less: Mapping[str, Any] | None = field(default=None, hash=False)
    over: Mapping[str, Any] | None = field(default=None, hash=False)
    grid: Grid | None = None
    conditions: str = ""

    @property
    def of_device(self) -> bool:
        """Tell whether the claim is about one device, not about scaling."""
        return self.quantity in OF_DEVICE

    @property
    def is_counted(self) -> bool:
        """Tell whether a value of one device is counted, without a clock."""
        return self.quantity in COUNTED

    @property
    def is_figure(self) -> bool:
        """Tell whether the source publishes its figure, and the figure is no input."""
        return self.role == "statement" and self.published is not None

    def found(self, device: DevicePaper) -> Interval | None:
        """Count or measure the quantity of one device; None if nothing gives it.

        Raises:
            ValueError: an argument is wrong; the message names the claim.
        """
        quantity = OF_DEVICE[self.quantity]
        try:
            value = quantity(device, **self.arguments)
            if self.less is not None:
                value = difference(value, quantity(device, **{**self.arguments, **self.less}))
            if self.over is not None:
                value = ratio(value, quantity(device, **{**self.arguments, **self.over}))
            return value
        except Missing:
            return None
        except (KeyError, TypeError, ValueError, ZeroDivisionError, re.error) as error:
            raise ValueError(f"claim {self.says!r}: {error}") from None

    def value(self, facts: Facts) -> float | None:
        """Compute the quantity from `facts`; None if these do not give it.

        Raises:
            ValueError: it would divide by 0, as by the bytes of one rank; names the claim.
        """
        try:
            if self.grid:
                return OVER_GRID[self.quantity](facts, self.grid)
            return QUANTITIES[self.quantity](facts, self.at)
        except Missing:
            return None
        except ZeroDivisionError:
            why = "would divide by 0 at this point"
            raise ValueError(f"claim {self.says!r}: quantity={self.quantity}: {why}") from None


@dataclass(frozen=True)
class Reproduction:
    """The study that measures what a paper claims, on an emulated cluster.

    Attributes:
        study: a file of conf/studies.
        hardware: a file of conf/hardware: the emulated cluster before anything is fitted.
        bytes_scale: scales gradients, which keeps the ratio of compute to communication.
        strategies, world_sizes, batch_sizes: the figures show these; batches are global.
        rate_crossover: two strategies: below which rate of the links is the first faster?
        setup: how it is measured, in words.
        cures: lines of the figure that shows the finding, the paper's own way first: each a name,
            a strategy, and, where they differ, the profile and the strategy of published figures.
    """

    study: str
    hardware: str
    bytes_scale: float
    strategies: tuple[str, ...]
    world_sizes: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    rate_crossover: tuple[str, str] | None = None
    setup: str = ""
    cures: tuple[Mapping[str, str], ...] = ()

    def __post_init__(self) -> None:
        if self.rate_crossover is not None and len(self.rate_crossover) != 2:
            raise ValueError(f"rate_crossover={self.rate_crossover}: must name two strategies")


@dataclass(frozen=True)
class Paper:
    """A file of conf/claims.

    Attributes:
        profile, hardware: the source of predictions; None: all claims are about one device.
        origin: the source in conf/published, if a fit of terms has its figures: predictions of its
            claims use the fit without it.
        model: a file of conf/model: the network, as far as it is counted; None: the profile is.
        reproduction: None if there is no study that measures the claims on scaling.
        networks, benches: of claims about one device; see lab.claims.device.
        study: the study that measures claims about one device; None: benches alone do.
        table: published seconds per mini-batch; see lab.claims.device.
        figures: of the source's tables, for arithmetic on them; see lab.claims.device.
        device: what the source measured on, one of DEVICES: no other kind judges its times.
    """

    title: str
    claims: tuple[Claim, ...]
    profile: str | None = None
    hardware: str | None = None
    model: str | None = None
    origin: str | None = None
    reproduction: Reproduction | None = None
    networks: Mapping[str, str] = field(default_factory=dict[str, str])
    benches: Mapping[str, str] = field(default_factory=dict[str, str])
    study: str | None = None
    table: Mapping[str, Any] = field(default_factory=dict[str, Any])
    figures: Mapping[str, Any] = field(default_factory=dict[str, Any])
    device: str | None = None

    def __post_init__(self) -> None:
        if (self.profile is None) != (self.hardware is None):
            raise ValueError("must give both profile and hardware, or neither")
        if self.device is not None:
            checks.one_of("device", self.device, DEVICES)
        scaling = next((claim for claim in self.claims if not claim.of_device), None)
        if self.profile is None and scaling:
            raise ValueError(f"claim {scaling.says!r}: needs a profile and hardware")

    @classmethod
    def parse(cls, node: Mapping[str, Any]) -> Paper:
        """Parse the content of a file of conf/claims.

        Raises:
            ValueError: an entry is malformed; the message names its sentence.
        """
        claims = [_claim(entry) for entry in checks.listed("claims", node.get("claims", ()))]
        try:
            claims += [_claim(one) for line in node.get("series", ()) for one in expand(line)]
            claims += [_claim(one) for line in node.get("sizes", ()) for one in by_size(line)]
            study = node.get("reproduction")
            reproduction = Reproduction(**_frozen(study)) if study else None
            if reproduction:
                check_types(reproduction)
            given = {key: v for key, v in _frozen(node).items() if key not in ("series", "sizes")}
            made = cls(**{**given, "claims": tuple(claims), "reproduction": reproduction})
            check_types(made)
            return made
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{node.get('title')}: {error}") from None


def _frozen(node: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same with tuples for lists, as dataclasses have them."""
    return {key: tuple(v) if isinstance(v, list) else v for key, v in node.items()}


def _claim(entry: Mapping[str, Any]) -> Claim:
    if not isinstance(entry, Mapping):
        raise ValueError(f"claims: {entry}: must have the keys of a claim")
    try:
        check, at = Bounds(**entry["check"]), _frozen(entry.get("at", {}))
        of_device = entry["quantity"] in OF_DEVICE
        where = {"at": ClaimPoint(), "arguments": at} if of_device else {"at": ClaimPoint(**at)}
        grid = _frozen(entry.get("grid", {}))
        cells = {"grid": Grid(**grid)} if grid else {}
        claim = Claim(**{**entry, "check": check, **where, **cells})
        for made in (check, claim.at, *cells.values(), claim):
            check_types(made)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"claim {entry.get('says')!r}: {error}") from None
    checks.one_of(f"claim {claim.says!r}: role", claim.role, ROLES)
    known = OVER_GRID if claim.grid else {**QUANTITIES, **OF_DEVICE}
    if claim.quantity not in known:
        allowed = ", ".join(known) + ("" if claim.grid else f"; with a grid {', '.join(OVER_GRID)}")
        raise ValueError(
            f"claim {claim.says!r}: quantity={claim.quantity}: no such quantity; allowed: {allowed}"
        )
    if claim.quantity == "operations" and not claim.at.layer:
        raise ValueError(f"claim {claim.says!r}: quantity=operations: at.layer: is missing")
    return claim


@dataclass(frozen=True)
class Grid:
    """Every profile with every number of ranks, per-rank batch and rate of the links.

    Attributes:
        strategies: any of them may win. over: the strategy that they must beat.
        margin: share of its step by which they must be faster.
        rates_gbit: of the links between nodes; None: the hardware's.
    """

    strategies: tuple[str, ...]
    profiles: tuple[str, ...]
    world_sizes: tuple[int, ...]
    per_rank_batch_sizes: tuple[int, ...]
    over: str = "overlap"
    margin: float = 0.05
    rates_gbit: tuple[float | None, ...] = (None,)

    def __post_init__(self) -> None:
        axes = ("strategies", "profiles", "world_sizes", "per_rank_batch_sizes", "rates_gbit")
        for key in axes:
            if not (isinstance(value := getattr(self, key), tuple) and value):
                raise ValueError(f"grid.{key}={value}: must be a list with at least one entry")
        if not self.margin >= 0:
            raise ValueError(f"grid.margin={self.margin}: must not be negative")
        for _ in self.cells:
            pass  # each point is checked as it is made

    @property
    def cells(self) -> Iterator[ClaimPoint]:
        """Yield each cell, with the strategy to beat."""
        axes = (self.profiles, self.world_sizes, self.per_rank_batch_sizes, self.rates_gbit)
        for profile, size, batch, rate in itertools.product(*axes):
            yield ClaimPoint(self.over, size, size * batch, profile, rate_gbit=rate)

    def gains(self, facts: Facts) -> list[float]:
        """Divide the step of `over` by the fastest strategy's, in each cell.

        Raises:
            Missing: a cell is not known.
        """
        return [
            facts.step_s(cell)
            / min(facts.step_s(replace(cell, strategy=name)) for name in self.strategies)
            for cell in self.cells
        ]


def win_share(facts: Facts, grid: Grid) -> float:
    """Return the share of cells in which any strategy wins."""
    gains = grid.gains(facts)
    return sum(gain > 1 + grid.margin for gain in gains) / len(gains)


def best_gain(facts: Facts, grid: Grid) -> float:
    """Return the largest gain of any strategy in any cell: what "up to" and "as much as" say."""
    return max(grid.gains(facts))


OVER_GRID: Mapping[str, Callable[[Facts, Grid], float]] = {
    "win_share": win_share,
    "best_gain": best_gain,
}


def expand(entry: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the claims of one entry of `series`.

    One rank's figure made the profile, so it is an input; the others claim a speedup of weak
    scaling.

    Args:
        entry: `says`, `source`, `strategy`, `profile`, `per_rank_batch_size`, `within`, and
            `samples_per_s` by number of ranks, one rank first. It may have `hardware` and `values`,
            as a point has, the `unit` of a sample if it is no image, and `conditions`.

    Raises:
        KeyError: one of these is missing.
    """
    rates = {
        size: checks.number(f"samples_per_s.{size}", rate, above=0)
        for size, rate in entry["samples_per_s"].items()
    }
    alone = rates.pop(1)
    batch_size = entry["per_rank_batch_size"]
    where = {key: entry[key] for key in ("profile", "hardware", "values") if key in entry}

    def claim(says: str, strategy: str, size: int, figure: float, within: float) -> dict[str, Any]:
        at = {**where, "strategy": strategy, "world_size": size}
        return {
            "source": entry["source"],
            "says": f"{entry['says']}: {says}",
            "role": "input" if size == 1 else "statement",
            "quantity": "samples_per_s" if size == 1 else "weak_speedup",
            "at": {**at, "batch_size": size * batch_size},
            "published": figure,
            "check": {"about": figure, "within": within},
            "conditions": "" if size == 1 else entry.get("conditions", ""),
        }

    unit = entry.get("unit", "images")
    yield claim(f"one GPU trains {alone} {unit}/s", "none", 1, alone, 0.02)
    for size, rate in rates.items():
        says = f"{size} GPUs, {rate} {unit}/s ({rate / alone:.2f} ×)"
        yield claim(says, entry["strategy"], size, rate / alone, entry["within"])


def by_size(entry: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the claims of one entry of `sizes`: bus bandwidths of all-reduces.

    Args:
        entry: `says`, `source`, `hardware`, `world_size`, `within`, and `gb_per_s` by MiB; those of
            `fitted` were fitted to, so they are inputs.

    Raises:
        KeyError: one of these is missing.
    """
    for mib, figure in entry["gb_per_s"].items():
        yield {
            "source": entry["source"],
            "says": f"{entry['says']}: {mib} MiB at {figure} GB/s",
            "role": "input" if mib in entry.get("fitted", ()) else "statement",
            "quantity": "bus_gb_per_s",
            "at": {
                "hardware": entry["hardware"],
                "world_size": entry["world_size"],
                "num_bytes": mib * 2**20,
            },
            "published": figure,
            "check": {"about": figure, "within": entry["within"]},
        }
