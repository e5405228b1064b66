"""Show reduce-scatters by size: times, ratios to torch's, and bytes that crossed the network."""

from __future__ import annotations

from typing import Any

from lab.benchmarks.views.text import ranged

HEADER = ["reduce-scatter", "size (B)", "time (us)", "mad", "ratio to torch", "sent", "#wrong"]


def table(result: dict[str, Any]) -> list[list[str]]:
    """List a header, and a line for each size and algorithm."""
    return [HEADER, *(_line(row) for row in result["rows"])]


def notes(result: dict[str, Any]) -> list[str]:
    """Explain the columns."""
    least = (result["world_size"] - 1) / result["world_size"]
    return [
        f"medians of {result['num_rounds']} rounds on {result['world_size']} ranks "
        f"({result['backend']}); a call takes as long as on its slowest rank",
        f"sent: bytes by the interfaces' counters, per rank and byte of the tensor; {least:.3g} is "
        "least; it includes headers, and all that others send",
    ]


def _line(row: dict[str, Any]) -> list[str]:
    share = row["crossed_share"]
    return [
        row["algorithm"],
        str(row["size_bytes"]),
        f"{1e6 * row['time_s']['median']:.1f}",
        f"{1e6 * row['time_s']['mad']:.1f}",
        ranged(row["ratio_to_torch"]),
        "-" if share is None else f"{share:.3f}",
        str(row["wrong"]),
    ]
