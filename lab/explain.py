"""Explain why a multi-rank run is not faster: `python -m lab.explain runs/demo/CELL`."""

from __future__ import annotations

import sys
from pathlib import Path

from lab.settings.command import Command, CommandLine
from lab.settings.command_line import answer
from lab.settings.errors import ConfigError
from lab.settings.overrides import file_to_write

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
    {"out": ("null", "FILE.txt or FILE.md for the text; null: printed alone")},
    word="STUDY[/CELL]",
)


def main(arguments: list[str]) -> int:
    """Explain one cell, or each multi-rank point of a study in a line.

    Returns:
        0, or 2 after one line on stderr for a run that cannot be explained.
    """
    return answer(COMMAND, arguments, _explain)


def _explain(line: CommandLine) -> int:
    out = file_to_write("out", COMMAND.texts(line.settings)["out"], ".txt", ".md")
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
