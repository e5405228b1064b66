"""Values that compressing exchanges send as they are."""

from __future__ import annotations

import math

from lab.exchange.base import Exchange, Shapes

NOTABLE = 0.1  # share of all values: sent as float32, they are most of what one bit each leaves


def left_exact(exchange: Exchange, shapes: Shapes) -> list[str]:
    """Say which values an exchange's codecs leave as they are, a line each, where they are many.

    Args:
        shapes: of the parameters that are exchanged, by name.
    """
    total = sum(map(math.prod, shapes.values()))
    return [
        f"{100 * number / total:.0f} % of the values travel as float32 ({number:,} of {total:,}): "
        f"{which}"
        for number, which in exchange.left_exact(shapes)
        if number >= NOTABLE * max(1, total)
    ]
