"""Draw figures and tables of studies, or the timeline of a cell: `python -m lab.plot runs/demo`."""

from __future__ import annotations

import sys
from pathlib import Path

from lab.settings.command import Command, CommandLine
from lab.settings.command_line import answer
from lab.settings.errors import ConfigError
from lab.settings.texts import listed, number, truth

FORMATS = ("png", "svg", "pdf")
COMMAND = Command(
    "lab.plot",
    """\
Draw the figures of a study and print its table; or draw the timeline of a measure=breakdown cell.
Writes summary.csv (a row per point), records.csv and records.parquet (all that is known of each
cell) too. Several studies, as of several machines, are shown as one.""",
    (
        "python -m lab.plot runs/demo",
        "python -m lab.plot runs/demo baseline=allreduce",
        "python -m lab.plot runs/demo/onebit-n2-breakdown",
        "python -m lab.plot runs/demo out=figures format=svg,pdf",
        "python -m lab.plot runs/demo width_in=3.3 title=false format=pdf only=scaling,payload",
        "python -m lab.plot machine1/runs/demo machine2/runs/demo out=both",
        "python -m lab.plot runs/demo target=0.9            time to 90 % accuracy",
    ),
    {
        "out": ("null", "folder to write to; null: STUDY/figures, or of several studies A+B"),
        "format": ("png,svg", f"a list of {', '.join(FORMATS)}"),
        "only": ("null", "a list of figures, by their names or how these begin; null: all"),
        "width_in": ("null", "width in inches, as of a paper's column; null: as contents need"),
        "title": ("true", "false: print title and footer as a caption instead"),
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
    several=True,
)


def main(arguments: list[str]) -> int:
    """Plot studies; the exit code is 2 for an input that cannot be plotted."""
    return answer(COMMAND, arguments, _plot)


def _plot(line: CommandLine) -> int:
    texts = COMMAND.texts(line.settings)
    given = {key: text for key, text in texts.items() if text != "null"}
    formats = listed("format", texts["format"], FORMATS)
    width_in = number("width_in", given["width_in"], at_least=2) if "width_in" in given else None
    target = number("target", given["target"]) if "target" in given else None
    title = truth("title", texts["title"])
    # Imported here: help and a wrong setting are answered before pandas and Altair load.
    from lab.analysis.results import Sink, report

    out = Path(given["out"]) if "out" in given else None
    sink = Sink(out, formats, listed("only", given.get("only", "")), width_in, title)
    try:
        report([Path(word) for word in line.words], sink, given.get("baseline"), target)
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from None
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
