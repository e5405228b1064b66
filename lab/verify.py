"""A paper's claims beside what the model predicts and what was measured: `lab.verify kim2017`."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from lab.claims.claims import Paper
from lab.claims.metrics import MeasuredFacts
from lab.claims.predicted import Predicted
from lab.claims.tables import claims_table
from lab.settings.command_line import report_error
from lab.settings.config import ConfigError, build, choices_of, load, read_file
from lab.simulate.hardware import Hardware

EXAMPLES = """examples:
  python -m lab.verify kim2017                           predicted beside published
  python -m lab.sweep study=kim2017                      measures them (root, some 30 minutes)
  python -m lab.verify kim2017 --runs runs/kim2017       measured beside both
  python -m lab.verify kim2017 --runs runs/kim2017 --out page.md     with all cells and figures
"""


def main(arguments: Sequence[str]) -> int:
    """Print the table of claims.

    Returns:
        0 if no claim fails, by what was measured or else by what is predicted; 1 if one does; 2 for
        a wrong argument.
    """
    asked = _parser().parse_args(arguments)
    try:
        paper = Paper.parse(read_file("claims", asked.paper))
        predicted = Predicted(paper.profile, Hardware.parse(read_file("hardware", paper.hardware)))
        measured = _measured(asked.runs, paper) if asked.runs else None
        table, verdicts = claims_table(paper, predicted, measured)
        lines = [f"# {paper.title}", "", *table, "", *_about(paper, measured)]
        print("\n".join(lines))
        if asked.out:
            from lab.claims import page  # which takes pandas and matplotlib

            command = shlex.join(["python", "-m", "lab.verify", *arguments])
            made = page.Page(asked.out, lines, command, paper, predicted, measured)
            page.write(made, asked.runs)
            print(f"wrote {asked.out}")
    except (ConfigError, ValueError, OSError) as error:
        report_error("lab.verify", error)
        return 2
    return int("fails" in verdicts)


def _measured(folder: Path, paper: Paper) -> MeasuredFacts:
    # Here, not above: without runs there is no need of pandas and torch.
    from lab.analysis.records import load_study
    from lab.claims.measured import Measured
    from lab.model.counts import parameters_of

    if not paper.reproduction:
        raise ValueError(f"--runs {folder}: there is no study of {paper.title}")
    model = load([f"model={paper.reproduction.model}"]).model
    cells = load_study(folder).cells
    return Measured(cells, paper.profile, parameters_of(partial(build, model)))


def _about(paper: Paper, measured: MeasuredFacts | None) -> list[str]:
    """What the columns of the table are of."""
    predicted = f"Predicted: profile {paper.profile} on {paper.hardware}, nothing fitted."
    if measured:
        how = "; ".join([*measured.machines(), *measured.emulations()])
        brackets = "In brackets the lowest and the highest of its repeats."
        counted = "Parameters are counted in the lab's own model; what is replayed is scaled."
        return [predicted, "", f"Measured: {how}. {brackets} {counted}"]
    if not paper.reproduction:
        return [predicted]
    study = paper.reproduction.study
    how = f"`python -m lab.sweep study={study}` (root) measures it, then `--runs runs/{study}`"
    return [predicted, f"Measured: nothing; {how}."]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lab.verify",
        description="Check a paper's claims against predictions and measurements.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("paper", choices=choices_of("claims"))
    parser.add_argument("--runs", type=Path, help="study folder with the measured cells")
    parser.add_argument("--out", type=Path, help="FILE.md for the page; figures go into FILE/")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
