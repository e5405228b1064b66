"""Explain why a multi-rank run is not faster: `python -m lab.explain runs/demo/CELL`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from lab.settings.command import Command, CommandLine, answer
from lab.settings.errors import ConfigError
from lab.settings.fields import file_setting, own_settings


@dataclass(frozen=True)
class Settings:
    """The settings of lab.explain."""

    out: Path | None = file_setting(
        "FILE.txt or FILE.md for the text; null: no file", ".txt", ".md"
    )


COMMAND = Command(
    "lab.explain",
    """\
Explain where a multi-rank run loses its time, by which evidence, and which setting would help most.
Rules and thresholds: lab/diagnosis/rules.py and docs/measuring.md.""",
    (
        "python -m lab.explain runs/demo/onebit-n2-b128-r0",
        "python -m lab.explain runs/demo",
        "python -m lab.explain runs/demo out=why.txt",
    ),
    Settings,
    word="STUDY[/CELL]",
)


def main(arguments: list[str]) -> int:
    """Explain one cell, or each multi-rank point of a study in a line.

    Returns:
        0, or 2 after one line on stderr for a run that cannot be explained.
    """
    return answer(COMMAND, arguments, _explain)


def _explain(line: CommandLine) -> int:
    out = own_settings(Settings, line.settings).out
    try:
        text = _explanation(Path(line.word))
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from None
    print(text)
    if out:
        out.write_text(text + "\n", encoding="utf-8")
        print(f"wrote {out}")
    return 0


def _explanation(path: Path) -> str:
    # Imported here: help and a wrong setting are answered before pandas loads.
    from lab.analysis.records import load_study
    from lab.diagnosis import view
    from lab.diagnosis.evidence import gather, gather_all
    from lab.diagnosis.rules import judge, remedies

    if (path / "record.json").is_file():
        study = load_study(path.resolve().parent)
        evidence = gather(study, next(c for c in study.cells if c.name == path.resolve().name))
        verdict = judge(evidence)
        return view.full(evidence, verdict, remedies(evidence, verdict))
    lines = [view.headline(each, judge(each)) for each in gather_all(load_study(path))]
    more = f"evidence, and what to try: python -m lab.explain {path}/CELL"
    others = f"what was not run, predicted: python -m lab.advise fit={path} hardware=..."
    return "\n".join([*lines, "", more, others])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
