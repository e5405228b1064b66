"""Write tables as text: aligned for a terminal, and in Markdown."""

from __future__ import annotations

from collections.abc import Sequence


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
