"""Shapes of a profile's layers, which has none of its own."""

from __future__ import annotations

from functools import cache

COLUMNS = range(1024, 2049)


def shapes(values: int) -> dict[str, tuple[int, ...]]:
    """Return shapes by name for a layer of `values` values; a profile holds no shapes.

    The weight is [rows, columns], as in an FC layer, whose rows 1-bit SGD quantises: of 1024 to
    2048 columns the number that leaves the smallest remainder, which becomes a bias. A layer of
    fewer than 1024 values is only a bias.
    """
    rows, rest = divmod(values, columns := _columns(values))
    weight = {"weight": (rows, columns)} if rows else {}
    return weight | ({"bias": (rest,)} if rest else {})


@cache  # a fit asks the same of the same few layers thousands of times
def _columns(values: int) -> int:
    return min(COLUMNS, key=lambda columns: values % columns)
