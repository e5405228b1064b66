"""Show what strategies add to the thread that trains, beside torch's DDP."""

from __future__ import annotations

from typing import Any

from lab.benchmarks.views.text import ranged


def table(result: dict[str, Any]) -> list[list[str]]:
    """List a header, and a line for each strategy."""
    rows = [
        [row["name"], ranged(row["added_s"], 1e6), ranged(row["over_ddp"])]
        for row in result["rows"]
    ]
    return [["", "added (us)", "x DDP"], *rows]


def notes(result: dict[str, Any]) -> list[str]:
    """Explain the figures."""
    return [
        f"processor time of the training thread in a step of {result['num_parameters']} "
        f"parameters on {result['num_ranks']} ranks, less that of backward alone "
        f"({1e6 * result['plain_s']['median']:.0f} us)",
        f"medians of {result['num_rounds']} rounds in turns; [95 % intervals] draw whole rounds",
    ]
