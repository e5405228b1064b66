"""Write one page about studies, to share: `python -m lab.report runs/mine`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from lab.settings.command import Command, CommandLine, answers
from lab.settings.errors import ConfigError, as_config_error
from lab.settings.fields import file_setting, own_settings


@dataclass(frozen=True)
class ReportSettings:
    out: Path | None = file_setting("FILE.html; null: report.html of the first study", ".html")


COMMAND = Command(
    "lab.report",
    """\
Write one HTML page about one or more studies: verdict, tables, charts, timelines, causes of lost
time, and records. The page opens offline, and its tables and charts need no JavaScript. For two
studies, it shows the differences. It also shows results of lab.bench (FILE.json).""",
    (
        "python -m lab.report runs/demo",
        "python -m lab.report runs/demo out=demo.html",
        "python -m lab.report runs/before runs/after out=change.html",
        "python -m lab.report runs/demo layers.json",
    ),
    ReportSettings,
    word="STUDY|FILE.json",
    several=True,
)


@answers(COMMAND)
def main(line: CommandLine) -> int:
    """Write the page; the exit code is 2 for an input that cannot be shown."""
    out = own_settings(ReportSettings, line.settings).out
    # Imported here: help and a wrong setting are answered before pandas and Altair load.
    from lab.web.page import parts_of, render, write

    paths = [Path(word) for word in line.words]
    studies = [path for path in paths if path.suffix != ".json"]
    if not (out or studies):
        raise ConfigError("out=null: no study is given; set out=FILE.html")
    target = out or studies[0] / "report.html"
    with as_config_error("", OSError):
        page = render(parts_of(paths, line.text))
        write(page, target)
    print(f"wrote {target}, {len(page.encode()):,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
