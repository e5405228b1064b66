"""Explain why a multi-rank run is not faster: `python -m lab.explain runs/demo/CELL`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from lab.settings.command import Command, CommandLine, answers
from lab.settings.errors import as_config_error
from lab.settings.fields import file_setting, own_settings
from lab.settings.storage import write_atomically


@dataclass(frozen=True)
class ExplainSettings:
    out: Path | None = file_setting(
        "FILE.txt or FILE.md for the text; null: no file", ".txt", ".md"
    )


COMMAND = Command(
    "lab.explain",
    """\
Explain where a multi-rank run loses its time, with evidence, and which setting would help most.
Rules and thresholds: lab/diagnosis/rules.py and docs/slow_steps.md.""",
    (
        "python -m lab.explain runs/demo/onebit-n2-b128-r0",
        "python -m lab.explain runs/demo",
        "python -m lab.explain runs/demo out=why.txt",
    ),
    ExplainSettings,
    word="STUDY[/CELL]",
)


@answers(COMMAND)
def main(line: CommandLine) -> int:
    """Explain one cell, or each multi-rank point of a study in a line.

    Returns:
        0, or 2 after one line on stderr for a run that cannot be explained.
    """
    out = own_settings(ExplainSettings, line.settings).out
    # Imported here: help and a wrong setting are answered before pandas loads.
    from lab.diagnosis.view import explained

    with as_config_error("", OSError):
        _, text = explained(Path(line.word))
    print(text)
    if out:
        write_atomically(out, lambda temporary: temporary.write_text(text + "\n", encoding="utf-8"))
        print(f"wrote {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
