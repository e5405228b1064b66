"""Check a paper's claims by predictions and measurements: `python -m lab.verify kim2017`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from lab.settings.command import Command, CommandLine, answer
from lab.settings.errors import ConfigError
from lab.settings.fields import file_setting, folder_setting, own_settings, setting
from lab.settings.files import choices_of

ALL = "all"


@dataclass(frozen=True)
class Settings:
    """The settings of lab.verify."""

    runs: Path | None = setting(None, "the measured cells' study; with all, a folder of studies")
    benches: Path | None = setting(None, "results of lab.bench, for claims about one device")
    out: Path | None = file_setting("FILE.md for the page; figures go into the folder FILE", ".md")
    config_dir: str | None = folder_setting("further claims/, hardware/ and profile/ files")


COMMAND = Command(
    "lab.verify",
    "Check a paper's claims against counts, predictions, and what measured them.",
    (
        "python -m lab.verify all                              every paper: how many claims hold",
        "python -m lab.verify kim2017                          published and predicted",
        "python -m lab.sweep study=kim2017                     measures them (root, 30 minutes)",
        "python -m lab.verify kim2017 runs=runs/kim2017        and measured",
        "python -m lab.verify kim2017 runs=runs/kim2017 out=page.md     all cells, and figures",
        "python -m lab.verify zhao2016 benches=results         one device: results of lab.bench",
        "python -m lab.verify mlperf,nccl_tests out=page.md    several papers, on one page",
    ),
    Settings,
    word="|".join([*choices_of("claims"), "FILE.yaml", ALL]),
)


def main(arguments: list[str]) -> int:
    """Print the table of claims.

    Returns:
        0 if no claim fails, by measurements or else by predictions; 1 if one does; 2 for a wrong
        setting.
    """
    return answer(COMMAND, arguments, _verify)


def _verify(line: CommandLine) -> int:
    own = own_settings(Settings, line.settings)
    runs, benches, out, folder = own.runs, own.benches, own.out, own.config_dir
    if out and line.word == ALL:
        raise ConfigError(f"out={out}: name the papers of a page: {ALL} are too many")
    from lab.claims import page
    from lab.claims.findings import verify, verify_all

    try:
        if line.word == ALL:
            every = verify_all(choices_of("claims", folder), runs, benches, folder)
            print("\n".join(page.overview(every)))
            return int(any(findings.any_claim_fails for findings in every.values()))
        if "," in line.word:
            every = verify_all(line.word.split(","), runs, benches, folder)
            print("\n".join(page.overview(every)))
            if out:
                page.write_several(every, out, out.with_suffix(""), line.text)
                print(f"wrote {out}")
            return int(any(findings.any_claim_fails for findings in every.values()))
        findings = verify(line.word, runs, benches, out is not None, folder)
        print("\n".join(page.summary(findings)))
        if out:
            page.write(findings, out, out.with_suffix(""), line.text)
            print(f"wrote {out}")
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from None
    return int(findings.any_claim_fails)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
