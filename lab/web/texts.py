"""Numbers as a page writes them."""

from __future__ import annotations

import math

from lab.measure.intervals import Interval

UNKNOWN_TEXT = "–"


def number_text(value: float, scale: float = 1.0) -> str:
    """Write a value to four digits, and never with an exponent."""
    return UNKNOWN_TEXT if math.isnan(value) else _digits(value * scale, 4)


def interval_text(value: Interval, scale: float = 1.0) -> str:
    """Write a value with its interval, if it has one, to as many digits as this warrants."""
    if math.isnan(value.mid) or math.isnan(value.lo):
        return number_text(value.mid, scale)
    ends = value.lo, value.mid, value.hi
    low, middle, high = (_digits(each * scale, 3) for each in ends)
    return f"{middle} [{low}, {high}]"


def _digits(value: float, count: int) -> str:
    rounded = float(f"{value:.{count}g}")
    if rounded == 0:
        return "0"
    decimals = max(0, count - 1 - math.floor(math.log10(abs(rounded))))
    return f"{rounded:.{min(decimals, 9)}f}"


def percent_text(ratio: Interval) -> str:
    """Write a ratio above or below 1 as a difference: +12 % [+9, +15]."""
    middle = f"{100 * (ratio.mid - 1):+.1f} %"
    if math.isnan(ratio.lo):
        return middle
    return f"{middle} [{100 * (ratio.lo - 1):+.1f}, {100 * (ratio.hi - 1):+.1f}]"
