"""Rules for which rows of a parameter each rail carries, from shapes alone, without torch.

A share depends on the parameter and on the number of rails, not on buckets, which are planned anew.
The exchange and its cost use the same rules.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def rows_of(shape: Sequence[int]) -> tuple[int, int]:
    """Return a parameter's rows, and the values in each. A scalar is one row, a value a column."""
    return (shape[0], math.prod(shape[1:])) if shape else (1, 1)


def share(rows: int, rail: int, rails: int) -> slice:
    """Return those of `rows` rows that a rail carries, maybe none."""
    return slice(rail * rows // rails, (rail + 1) * rows // rails)


def part_shape(shape: Sequence[int], rail: int, rails: int) -> tuple[int, ...]:
    """Return the shape of the rows that a rail carries."""
    rows = share(rows_of(shape)[0], rail, rails)
    return (rows.stop - rows.start, *shape[1:])
