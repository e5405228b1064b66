"""Arithmetic with values and their intervals.

Ends are combined so that the result is as wide as it can be: terms that a benchmark measured in
turns share their drift, which cannot be told from their intervals alone.
"""

from __future__ import annotations

from collections.abc import Iterable

from lab.measure.intervals import Interval


def exact(value: float) -> Interval:
    """Return a value that has no interval because nothing about it is uncertain."""
    return Interval(value, value, value)


def total(values: Iterable[Interval]) -> Interval:
    """Add up; of nothing it is 0."""
    terms = list(values)
    return Interval(*(sum(getattr(term, end) for term in terms) for end in ("lo", "mid", "hi")))


def ratio(numerator: Interval, denominator: Interval) -> Interval:
    """Divide positive values."""
    ends = (numerator.lo / denominator.hi, numerator.mid / denominator.mid)
    return Interval(*ends, numerator.hi / denominator.lo)


def difference(first: Interval, second: Interval) -> Interval:
    """Subtract."""
    return Interval(first.lo - second.hi, first.mid - second.mid, first.hi - second.lo)
