"""Fifteen minutes on a GPU: `python -m lab.gpu_report`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from lab.gpu_report import run
from lab.gpu_report.items import ReportSizes, chosen, items_of
from lab.settings.command import Command, CommandLine, answers
from lab.settings.fields import file_setting, own_settings, setting


@dataclass(frozen=True)
class GpuReportSettings:
    minutes: float = setting(15, "time budget; items that would exceed it are skipped", above=0)
    items: tuple[str, ...] | None = setting(None, "items, by key or its first letters; null: all")
    again: bool = setting(False, "true: repeat items that the file already contains")
    out: Path | None = file_setting(
        "FILE.json, with its page FILE.md and figures; null: gpu_report.json", ".json"
    )
    page: Path | None = setting(None, "FILE.json of an existing report: write only its page")
    pretend: bool = setting(False, "true: try the report on a CPU, at tiny sizes")


COMMAND = Command(
    "lab.gpu_report",
    """\
Measure a GPU in fifteen minutes, and compare the results with expected bounds. The measurements,
called items, are the step times of several strategies, codec rates, host time, utilisation, and the
single-device benchmarks. They all run in one process. The file is updated after each item. To
measure the items that are missing, run the same command again.""",
    (
        "python -m lab.gpu_report out=docs/results/gpu-h200.json",
        "python -m lab.gpu_report items=steps,codecs-64 again=true minutes=5 out=mine.json",
        "python -m lab.gpu_report page=mine.json",
    ),
    GpuReportSettings,
    stopped="stopped; the file contains the finished items; run the same command to continue",
)


@answers(COMMAND)
def main(line: CommandLine) -> int:
    """Measure, and write a page.

    Returns:
        0; 1 if an item failed; 2 for a wrong setting, or without a GPU; 130 after Ctrl-C.
    """
    settings = own_settings(GpuReportSettings, line.settings)
    path = settings.page or settings.out or Path("gpu_report.json")
    if settings.page:
        report = run.opened("page", path)
    else:
        items = chosen(items_of(ReportSizes(settings.pretend)), settings.items)
        report = run.begun(path, line.text, settings.pretend)
        todo = run.left(items, report, settings.again)
        from lab.gpu_report.measuring import measure  # imports torch

        if not run.measure(todo, report, path, 60 * settings.minutes, measure):
            print("this process has lost the GPU; start the same command again to continue")
    from lab.gpu_report import page  # imports torch

    print("\n".join(page.write(path.with_suffix(".md"), report)))
    return int(any(entry["status"] == run.FAILED for entry in report["items"].values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
