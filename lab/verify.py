"""Check a paper's claims by predictions and measurements: `python -m lab.verify kim2017`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from lab.settings.command import Command, CommandLine, answers
from lab.settings.errors import ConfigError, as_config_error
from lab.settings.fields import file_setting, folder_setting, own_settings, setting
from lab.settings.files import choices_of

ALL = "all"


@dataclass(frozen=True)
class VerifySettings:
    runs: Path | None = setting(
        None, "the study with the measured cells; with all, a folder of studies"
    )
    benches: Path | None = setting(None, "results of lab.bench, for claims about one device")
    out: Path | None = file_setting("FILE.md for the page; figures go into the folder FILE", ".md")
    config_dir: str | None = folder_setting("a folder with claims/, hardware/ and profile/ files")


COMMAND = Command(
    "lab.verify",
    "Check a paper's claims against counts, predictions and measurements.",
    (
        "python -m lab.verify all                              every paper: how many claims hold",
        "python -m lab.sweep study=kim2017                     measure its cells (root, 30 min)",
        "python -m lab.verify kim2017 runs=runs/kim2017 out=page.md     all cells, and figures",
        "python -m lab.verify zhao2016 benches=results         one device: results of lab.bench",
        "python -m lab.verify mlperf nccl_tests out=page.md    several papers on one page",
    ),
    VerifySettings,
    word="|".join([*choices_of("claims"), "FILE.yaml", ALL]),
    several=True,
)


@answers(COMMAND)
def main(line: CommandLine) -> int:
    """Print the table of claims.

    Returns: 0 if no claim fails, by measurements or else predictions; 1; 2 for a wrong setting.
    """
    own, words = own_settings(VerifySettings, line.settings), line.words
    out, folder = own.out, own.config_dir
    if ALL in words and (out or len(words) > 1):
        why = "it allows neither other papers nor out=; name the papers instead"
        raise ConfigError(f"{' '.join(words)}: {why}")
    if len({*words}) < len(words):
        raise ConfigError(f"{' '.join(words)}: the same paper is named twice")
    from lab.claims import page
    from lab.claims.findings import verify, verify_all

    with as_config_error("", OSError):
        if ALL in words or len(words) > 1:
            names = choices_of("claims", folder) if ALL in words else words
            every = verify_all(names, own.runs, own.benches, folder)
        else:
            every = {line.word: verify(line.word, own.runs, own.benches, bool(out), folder)}
        print(page.printed(every))
        if out:
            page.write(every, out, line.text)
    if out:
        print(f"wrote {out}")
    outcomes = {each.outcome for findings in every.values() for each in findings.verdicts}
    return int("fails" in outcomes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
