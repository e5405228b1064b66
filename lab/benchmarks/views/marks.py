"""Show what the marks of own times cost: a ratio and a difference, so there is no figure."""

from __future__ import annotations

from typing import Any

from lab.benchmarks.views.text import ranged


def table(result: dict[str, Any]) -> list[list[str]]:
    """List a header, and a line with and one without marks."""
    texts = [
        [row["name"], f"{1e3 * row['step_s']['median']:.3f}", f"{1e3 * row['step_s']['mad']:.3f}"]
        for row in result["rows"]
    ]
    extra = [[ranged(result["ratio"]), ranged(result["added_s"], 1e6)], ["1", ""]]
    header = ["", "turn (ms)", "mad", "ratio", "added (us)"]
    return [header, *([*text, *more] for text, more in zip(texts, extra, strict=True))]


def notes(result: dict[str, Any]) -> list[str]:
    """Explain the figures."""
    share = 100 * result["marks_s"] / result["rows"][1]["step_s"]["median"]
    return [
        f"medians of {result['num_pairs']} turns of each on {result['world_size']} ranks "
        f"({result['backend']}), by the slowest rank; [95 % intervals] draw whole rounds",
        f"marks alone, in steps without work: {1e6 * result['marks_s']:.1f} us for "
        f"{result['num_buckets']} buckets, {share:.3f} % of a turn",
    ]
