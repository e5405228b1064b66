"""Write tables as text: aligned for a terminal, and in Markdown."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Sequence
from itertools import zip_longest

UNKNOWN_TEXT = "–"
SYMBOL = re.compile(r"\w+ = ")  # at the beginning, such as n
NARROW = 8  # letters of a column that is not made narrower


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


def plain(lines: Sequence[str], width: int = 110) -> list[str]:
    """Write lines of Markdown for a terminal: texts wrapped, tables aligned and as wide as fits."""
    written, table = list[str](), list[list[str]]()
    for line in [*lines, ""]:
        if line.startswith("| "):
            table.append(line.strip("| ").split(" | "))
            continue
        if table:
            written += _fitted([table[0], *table[2:]], width)
            table = []
        text = line.lstrip("#").strip().replace("**", "")
        written += textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [
            ""
        ]
        written += ["=" * min(width, len(text))] if line.startswith("#") else []
    return written[:-1]


def _fitted(table: Sequence[Sequence[str]], width: int) -> list[str]:
    """Align a header and its lines, without columns that say nothing, in cells of several lines."""
    columns = [one for one in zip(*table, strict=True) if {*one[1:]} - {UNKNOWN_TEXT}]
    widths = [max(map(len, column)) for column in columns]
    while sum(widths) + 2 * (len(widths) - 1) > width and max(widths) > NARROW:
        shares = [0.4 * widths[0], *widths[1:]]  # the first column says what a line is about
        widths[shares.index(max(shares))] -= 1
    lines = list[str]()
    for number, row in enumerate(zip(*columns, strict=True)):
        cells = [textwrap.wrap(*each) for each in zip(row, widths, strict=True)]
        lines += [
            "  ".join(part.ljust(width) for part, width in zip(parts, widths, strict=True)).rstrip()
            for parts in zip_longest(*cells, fillvalue="")
        ]
        lines += ["  ".join("-" * each for each in widths)] if number == 0 else []
    return lines


def in_words(parts: Sequence[str]) -> str:
    """Join parts of a sentence with commas, and the last one with "and"."""
    return " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]]))


def sentence(clause: str) -> str:
    """Write a clause with a capital letter and one full stop; a command, or n = 3, as it is."""
    if clause.startswith("python -m "):
        return clause
    first = clause[:1] if SYMBOL.match(clause) else clause[:1].upper()
    return f"{first}{clause[1:].rstrip('.')}."


def number_of(count: int, noun: str) -> str:
    """Write how many there are: 1 cell, 2 cells."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def short_text(value: float, digits: int = 3) -> str:
    """Write a value to at most so many digits, or all before its point: 0.5, 12.3, 1234."""
    return f"{value:.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:.{digits}g}"


def number_text(value: float, scale: float = 1.0, digits: int = 3) -> str:
    """Write a value to so many digits, or all before its point, and never with an exponent."""
    if math.isnan(value):
        return UNKNOWN_TEXT
    rounded = float(f"{value * scale:.{digits}g}")
    if rounded == 0:
        return "0"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(rounded))))
    return f"{value * scale:,.{min(decimals, 9)}f}"
