"""Figures and tables of a study, or the timeline of a cell: `python -m lab.plot runs/demo`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

FORMATS = ("png", "svg", "pdf")
EXAMPLES = """examples:
  python -m lab.plot runs/demo
  python -m lab.plot runs/demo --baseline allreduce
  python -m lab.plot runs/demo/onebit-n2-breakdown
  python -m lab.plot runs/demo --out figures --format svg,pdf
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Plot one study.

    Returns:
        0, or 2 after one line on stderr for an input that cannot be plotted.
    """
    asked = _parser().parse_args(arguments)
    # Here, not above: --help and a wrong flag then answer before pandas and matplotlib load.
    from lab.analysis.plot import report

    try:
        report(
            asked.study,
            asked.out or asked.study / "figures",
            _formats(asked.format),
            asked.baseline,
        )
    except (ValueError, OSError) as error:
        print(f"lab.plot: error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lab.plot",
        description="Write the figures and summary.csv of a study, and print its table; or draw "
        "the timeline of a cell, which runs with measure=breakdown have.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "study", type=Path, help="study folder (holds <cell>/record.json), or a cell's"
    )
    parser.add_argument("--out", type=Path, help="folder to write to (default: STUDY/figures)")
    parser.add_argument(
        "--format", default="png,svg", help=f"comma-separated, of {', '.join(FORMATS)}"
    )
    parser.add_argument(
        "--baseline",
        help="strategy whose 1-rank runs speedup is measured from (default: none, or each "
        "series' own where the study has no run of none)",
    )
    return parser


def _formats(text: str) -> list[str]:
    asked = [part.strip() for part in text.split(",")]
    for name in asked:
        if name not in FORMATS:
            raise ValueError(f"format={name!r}; allowed are {', '.join(FORMATS)}")
    return asked


if __name__ == "__main__":
    sys.exit(main())
