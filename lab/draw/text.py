"""Write tables as text: aligned for a terminal, and in Markdown."""

from __future__ import annotations

import math
from collections.abc import Sequence

UNKNOWN_TEXT = "–"


def aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """Pad a header and its lines to columns, the first to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in table
    ]


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Write the lines of a table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def in_words(parts: Sequence[str]) -> str:
    """Join parts of a sentence with commas, and the last one with "and"."""
    return " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]]))


def number_of(count: int, noun: str) -> str:
    """Write how many there are: 1 cell, 2 cells."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def number_text(value: float, scale: float = 1.0, digits: int = 3) -> str:
    """Write a value to so many digits, or all before its point, and never with an exponent."""
    return UNKNOWN_TEXT if math.isnan(value) else _digits(value * scale, digits)


def _digits(value: float, count: int) -> str:
    rounded = float(f"{value:.{count}g}")
    if rounded == 0:
        return "0"
    decimals = max(0, count - 1 - math.floor(math.log10(abs(rounded))))
    return f"{value:,.{min(decimals, 9)}f}"
