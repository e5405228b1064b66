"""Draw figures and tables of studies, or the timeline of a cell: `python -m lab.plot runs/demo`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from lab.settings.command import Command, CommandLine, answers
from lab.settings.errors import as_config_error
from lab.settings.fields import own_settings, setting


@dataclass(frozen=True)
class PlotSettings:
    out: Path | None = setting(
        None, "folder to write to; null: STUDY/figures, or A+B for several studies"
    )
    format: tuple[str, ...] = setting(("png", "svg"), "list of formats", ("png", "svg", "pdf"))
    only: tuple[str, ...] | None = setting(
        None, "list of figures, by name or by the first part of the name; null: all"
    )
    width_in: float | None = setting(
        None,
        "width, such as that of a column; null: as wide as needed",
        unit="inches",
        at_least=2,
        at_most=100,
    )
    title: bool = setting(True, "false: print title and footer as a caption instead")
    baseline: str | None = setting(
        None,
        "strategy whose 1-rank run is the baseline of speedup; null: none, or each series' own",
    )
    target: float | None = setting(
        None, "value of the metric: print the time to reach it (needs eval_every=...)"
    )
    recorder: str = setting(
        "local", "wandb: also upload the output as an artifact", ("local", "wandb")
    )


COMMAND = Command(
    "lab.plot",
    """\
Draw the figures of a study and print its table, or draw the timeline of a cell that was run with
measure=breakdown. For a study, the command also writes summary.csv (a row per point), records.csv
and records.parquet (all data of each cell). Several studies, for example from several machines, are
shown as one.""",
    (
        "python -m lab.plot runs/demo",
        "python -m lab.plot runs/demo baseline=allreduce",
        "python -m lab.plot runs/demo/onebit-n2-breakdown",
        "python -m lab.plot runs/demo out=figures format=svg,pdf",
        "python -m lab.plot runs/demo width_in=3.3 title=false format=pdf only=scaling,payload",
        "python -m lab.plot machine1/runs/demo machine2/runs/demo out=both",
        "python -m lab.plot runs/demo target=0.9            time to 90 % accuracy",
        "WANDB_MODE=online python -m lab.plot runs/demo recorder=wandb",
    ),
    PlotSettings,
    word="STUDY[/CELL]",
    several=True,
)


@answers(COMMAND)
def main(line: CommandLine) -> int:
    """Plot studies; the exit code is 2 for an input that cannot be plotted."""
    own = own_settings(PlotSettings, line.settings)
    # Imported here: help and a wrong setting are answered before pandas and Altair load.
    from lab.analysis.results import Sink, report

    sink = Sink(own.out, own.format, own.only or (), own.width_in, own.title, own.recorder)
    with as_config_error("", OSError):
        report([Path(word) for word in line.words], sink, own.baseline, own.target)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
