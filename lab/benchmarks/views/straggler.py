"""Show how many planted delays were found, and how many clean runs were accused."""

from __future__ import annotations

from typing import Any

from lab.benchmarks.straggler import CLOSE, DELAYS_S, OUTCOMES
from lab.measure.intervals import Interval


def table(result: dict[str, Any]) -> list[list[str]]:
    """List a header, and a line per phase and for all."""
    header = ["delayed phase", "runs", *OUTCOMES, "% found", "within 10 %", "error (%)", "most"]
    return [header, *(_line(row) for row in result["rows"])]


def notes(result: dict[str, Any]) -> list[str]:
    """Explain the columns, and tell of the clean runs."""
    clean, low, high = result["clean"], *(1e3 * each for each in DELAYS_S)
    return [
        f"{clean['accused']} of {clean['runs']} clean runs accuse a rank: "
        f"{_percent(clean['share'])} %",
        f"delays of {low:.0f} to {high:.0f} ms in steps of {1e3 * result['step_s']:.1f} ms on "
        f"{result['world_size']} ranks ({result['backend']}); [95 % intervals] are Wilson's",
        f"within {100 * CLOSE:.0f} %, error: of the delay, where it was found; its median and most",
    ]


def _line(row: dict[str, Any]) -> list[str]:
    error = row["error"]
    errors = [f"{100 * error[key]:.2f}" for key in ("median", "most")] if error else ["-", "-"]
    counts = [str(row[key]) for key in ("runs", *OUTCOMES)]
    return [row["name"], *counts, _percent(row["share"]), str(row["close"]), *errors]


def _percent(share: dict[str, float]) -> str:
    value = Interval.read(share).scaled(100)
    return f"{value.mid:.1f} [{value.lo:.1f}, {value.hi:.1f}]"
