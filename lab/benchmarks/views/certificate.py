"""Show the cost of check=first: a few numbers for each strategy, so there is no figure."""

from __future__ import annotations

from typing import Any

from lab.benchmarks.views.text import ranged


def table(result: dict[str, Any]) -> list[list[str]]:
    """List a header, and a line for each strategy."""
    header = ["", "step (ms)", "mad", "check adds (ms)", "in steps"]
    return [header, *(_line(row) for row in result["rows"])]


def notes(result: dict[str, Any]) -> list[str]:
    """Explain the columns, and show what was certified."""
    return [
        f"medians of {result['num_rounds']} rounds on {result['world_size']} ranks "
        f"({result['backend']}): a run's first three steps, with the check and without it",
        "[95 % intervals] draw whole rounds",
        *(f"{row['name']}: {row['line']}" for row in result["rows"]),
    ]


def _line(row: dict[str, Any]) -> list[str]:
    return [
        row["name"],
        f"{1e3 * row['step_s']['median']:.2f}",
        f"{1e3 * row['step_s']['mad']:.2f}",
        ranged(row["added_s"], 1e3),
        ranged(row["added_steps"]),
    ]
