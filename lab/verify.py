"""Check a paper's claims by predictions and measurements: `python -m lab.verify kim2017`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from lab.settings.command import Command, CommandLine
from lab.settings.command_line import answer
from lab.settings.errors import ConfigError
from lab.settings.files import choices_of
from lab.settings.overrides import config_dir_of, file_to_write

COMMAND = Command(
    "lab.verify",
    "Check a paper's claims against predictions, and against a study that measured them.",
    (
        "python -m lab.verify kim2017                          published and predicted",
        "python -m lab.sweep study=kim2017                     measures them (root, 30 minutes)",
        "python -m lab.verify kim2017 runs=runs/kim2017        and measured",
        "python -m lab.verify kim2017 runs=runs/kim2017 out=page.md     all cells, and figures",
    ),
    {
        "runs": ("null", "study folder with the measured cells"),
        "out": ("null", "FILE.md for the page; figures go into the folder FILE"),
        "config_dir": ("null", "folder of further claims/, hardware/ and profile/ files"),
    },
    word="|".join([*choices_of("claims"), "FILE.yaml"]),
)


def main(arguments: list[str]) -> int:
    """Print the table of claims.

    Returns:
        0 if no claim fails, by measurements or else by predictions; 1 if one does; 2 for a wrong
        setting.
    """
    command = shlex.join(["python", "-m", COMMAND.name, *arguments])
    return answer(COMMAND, arguments, lambda line: _verify(line, command))


def _verify(line: CommandLine, command: str) -> int:
    texts = COMMAND.texts(line.settings)
    runs = None if texts["runs"] == "null" else Path(texts["runs"])
    out = file_to_write("out", texts["out"], ".md")
    folder = config_dir_of(line.settings)
    from lab.claims import page
    from lab.claims.findings import verify

    try:
        findings = verify(line.word, runs, reproduce=out is not None, config_dir=folder)
        print("\n".join(page.summary(findings)))
        if out:
            page.write(findings, out, out.with_suffix(""), command)
            print(f"wrote {out}")
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from None
    return int(findings.any_claim_fails)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
