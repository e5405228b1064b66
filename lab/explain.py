"""Why a multi-rank run is not faster: `python -m lab.explain runs/demo/onebit-n2-b128-r0`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

EXAMPLES = """examples:
  python -m lab.explain runs/demo/onebit-n2-b128-r0
  python -m lab.explain runs/demo

Rules and thresholds: lab/diagnosis/rules.py and docs/measuring.md.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Explain one cell, or each multi-rank point of a study in a line.

    Returns:
        0, or 2 after one line on stderr for a run that has nothing to explain.
    """
    asked = _parser().parse_args(arguments)
    # Here, not above: --help and a wrong flag then answer before pandas loads.
    from lab.analysis.records import load_study
    from lab.diagnosis import view
    from lab.diagnosis.evidence import gather, gather_all
    from lab.diagnosis.remedies import remedies
    from lab.diagnosis.rules import judge

    path: Path = asked.run
    try:
        if (path / "record.json").is_file():
            study = load_study(path.resolve().parent)
            evidence = gather(study, next(c for c in study.cells if c.name == path.resolve().name))
            verdict = judge(evidence)
            print(view.full(evidence, verdict, remedies(evidence, verdict)))
        else:
            for evidence in gather_all(load_study(path)):
                print(view.headline(evidence, judge(evidence)))
            print(f"\nevidence, and what to try: python -m lab.explain {path}/CELL")
    except (ValueError, OSError) as error:
        print(f"lab.explain: error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lab.explain",
        description="Say what a multi-rank run loses its time to, on which evidence, and which "
        "switch would help most.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, help="runs/STUDY/CELL, or runs/STUDY for all of a study")
    return parser


if __name__ == "__main__":
    sys.exit(main())
