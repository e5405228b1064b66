"""Draw figures and tables of a study, or the timeline of a cell: `python -m lab.plot runs/demo`."""

from __future__ import annotations

import sys
from pathlib import Path

from lab.settings.command import Command, CommandLine
from lab.settings.command_line import answer
from lab.settings.errors import ConfigError

FORMATS = ("png", "svg", "pdf")
COMMAND = Command(
    "lab.plot",
    """\
Write the figures and summary.csv of a study, and print its table; or draw the timeline of a cell
that ran with measure=breakdown.""",
    (
        "python -m lab.plot runs/demo",
        "python -m lab.plot runs/demo baseline=allreduce",
        "python -m lab.plot runs/demo/onebit-n2-breakdown",
        "python -m lab.plot runs/demo out=figures format=svg,pdf",
        "python -m lab.plot runs/demo target=0.9            time to 90 % accuracy",
    ),
    {
        "out": ("null", "folder to write to; null: STUDY/figures"),
        "format": ("png,svg", f"a list of {', '.join(FORMATS)}"),
        "baseline": (
            "null",
            "strategy whose 1-rank runs are the baseline of speedup; null: none, or each series' "
            "own if the study has no run of none",
        ),
        "target": (
            "null",
            "value of the metric: print the time to reach it (needs eval_every=...)",
        ),
    },
    word="STUDY[/CELL]",
)


def main(arguments: list[str]) -> int:
    """Plot one study; the exit code is 2 for an input that cannot be plotted."""
    return answer(COMMAND, arguments, _plot)


def _plot(line: CommandLine) -> int:
    texts = COMMAND.texts(line.settings)
    formats = _formats(texts["format"])
    # Imported here: help and a wrong setting are answered before pandas and matplotlib load.
    from lab.analysis.plot import report

    folder = Path(line.word)
    out = folder / "figures" if texts["out"] == "null" else Path(texts["out"])
    baseline = None if texts["baseline"] == "null" else texts["baseline"]
    target = None if texts["target"] == "null" else _number("target", texts["target"])
    try:
        report(folder, out, formats, baseline, target)
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from None
    return 0


def _number(key: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{key}={text}: must be a number") from None


def _formats(text: str) -> list[str]:
    formats = [word.strip() for word in text.strip("[]").split(",")]
    for name in formats:
        if name not in FORMATS:
            raise ConfigError(f"format={name}: allowed are {', '.join(FORMATS)}")
    return formats


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
