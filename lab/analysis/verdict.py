"""Compare strategies over a map's places: with the fastest one, and one with another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lab.analysis.places import ADAPTIVE, REFERENCE, Place, Where
from lab.measure.intervals import Interval, of_level, wilson

WITHIN = 0.03  # of the fastest fixed strategy: so close a choice made in a run should be
SLOWER = 0.02  # by more than this a schedule that should never lose has lost


@dataclass(frozen=True)
class Compared:
    """Two strategies at one place.

    Attributes:
        step: ratio of their steps, paired by repeat. exposed: of their exposed exchange.
    """

    where: Where
    names: tuple[str, str]
    step: Interval
    exposed: Interval


@dataclass(frozen=True)
class Summary:
    """Ratios of two strategies' steps over several places.

    Attributes:
        step, exposed: geometric means over places, with intervals over places.
        beyond: share of places where the ratio exceeds 1 + `limit`, with Wilson's interval.
        worst: the place with the largest ratio of steps.
    """

    num_places: int
    step: Interval
    num_exposed: int
    exposed: Interval
    limit: float
    beyond: Interval
    worst: Compared


def behind(place: Place) -> dict[str, Interval]:
    """Return each strategy's step over that of the fastest fixed one, the fastest first."""
    fastest = place.fastest()
    found = {name: place.ratio(name, fastest) for name in place.steps_s}
    return dict(sorted(found.items(), key=lambda item: item[1].mid))


def against_fastest(places: Sequence[Place], name: str, floor: float) -> list[Compared]:
    """Compare a strategy with the fastest fixed one of each place where it was measured."""
    return [
        _compared(place, name, place.fastest(), floor) for place in places if name in place.steps_s
    ]


def against(places: Sequence[Place], name: str, other: str, floor: float) -> list[Compared]:
    """Compare two strategies at each place where both were measured."""
    both = (place for place in places if {name, other} <= place.steps_s.keys())
    return [_compared(place, name, other, floor) for place in both]


def summary(compared: Sequence[Compared], limit: float) -> Summary | None:
    """Summarise over places; None without any."""
    if not compared:
        return None
    exposed = [each.exposed.mid for each in compared if not math.isnan(each.exposed.mid)]
    num_beyond = sum(each.step.mid > 1 + limit for each in compared)
    return Summary(
        len(compared),
        of_level([each.step.mid for each in compared]),
        len(exposed),
        of_level(exposed),
        limit,
        Interval.read(wilson(num_beyond, len(compared))),
        max(compared, key=lambda each: each.step.mid),
    )


def summaries(places: Sequence[Place], floor: float) -> dict[str, Summary]:
    """Summarise `auto` against the fastest fixed strategy, and `priority` against `overlap`."""
    pairs = {
        **{name: (against_fastest(places, name, floor), WITHIN) for name in ADAPTIVE},
        "priority": (against(places, "priority", REFERENCE, floor), SLOWER),
    }
    found = {name: summary(*pair) for name, pair in pairs.items()}
    return {name: each for name, each in found.items() if each}


def _compared(place: Place, name: str, other: str, floor: float) -> Compared:
    least = 0.0 if math.isnan(floor) else floor
    exposed = place.exposed_ratio(name, other, least)
    return Compared(place.where, (name, other), place.ratio(name, other), exposed)
