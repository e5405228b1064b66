"""Show the cost of book-keeping: one number, so there is no figure."""

from __future__ import annotations

from typing import Any


def table(result: dict[str, Any]) -> list[list[str]]:
    """List a header and one line."""
    row = result["rows"][0]
    cost = [f"{1e6 * row['seconds_per_step']:.2f}", f"{100 * row['share_of_a_50_ms_step']:.4f}"]
    return [["steps", "us per step", "% of a 50 ms step"], [str(row["num_steps"]), *cost]]


def notes(_result: dict[str, Any]) -> list[str]:
    """Explain the number."""
    return ["steps without work: marks of the clock, losses, progress and the watchdog's lock"]
