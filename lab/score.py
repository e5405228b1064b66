"""Score predictions on a study's cells: `python -m lab.score runs/links`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from lab.settings.command import Command, CommandLine, answers
from lab.settings.errors import ConfigError, as_config_error
from lab.settings.fields import file_setting, folder_setting, own_settings, setting
from lab.settings.files import read_file


@dataclass(frozen=True)
class ScoreSettings:
    hardware: str = setting("emulated_1gbit", "a file in conf/hardware, from which the fit starts")
    profile: str = setting("alexnet_titanx", "a file in conf/profile, for cells of a real model")
    config_dir: str | None = folder_setting("folder with further hardware/ and profile/ files")
    out: Path | None = file_setting("FILE.md for the page; FILE.png for its figure", ".md")
    terms: Path | None = file_setting("FILE.yaml for the terms that `published` learns", ".yaml")


COMMAND = Command(
    "lab.score",
    """\
Fit hardware values to a study's cells on one and two ranks, and score the predictions for all other
cells. The command also scores lab.advise wherever several strategies were measured under the same
conditions. For `published`, the command fits terms for GPUs to published speedups. It then scores
the predictions for each source, with terms that are fitted only to the other sources.""",
    (
        "python -m lab.sweep study=links                       measure the cells (root)",
        "python -m lab.score runs/links                        scores by link and by strategy",
        "python -m lab.score runs/links out=links.md           a page with every cell and a figure",
        "python -m lab.score published out=page.md             published speedups (a few minutes)",
    ),
    ScoreSettings,
    word="runs/STUDY|published",
)


@answers(COMMAND)
def main(line: CommandLine) -> int:
    """Print the scores; write the page to `out=`. The exit code is 2 for bad input."""
    own = own_settings(ScoreSettings, line.settings)
    if line.word == "published":
        for word in line.settings:
            if word.partition("=")[0] in ("hardware", "profile", "config_dir"):
                raise ConfigError(f"{word}: applies to a study, not to `published`")
        from lab.claims import published_page

        return published_page.report(own.out, own.terms, line.text)
    if own.terms:
        raise ConfigError(f"terms={own.terms}: applies to `published`, not to a study")
    profile = read_file("profile", own.profile, own.config_dir)
    hardware = read_file("hardware", own.hardware, own.config_dir)
    # Imported here: a wrong setting is answered before pandas and Altair load.
    from lab.advice import score as advice
    from lab.simulate import scorecard

    with as_config_error("", OSError):
        card = scorecard.of_study(Path(line.word), profile, hardware)
        advised = advice.report(advice.choices(card.groups))
        sections = ["## Advice", "", *advised, ""] if advised else []
        mapped = advice.map_of(card.places, card.groups, card.noise_floor)
        sections += advice.section(mapped)
        print("\n".join([*scorecard.summary(card), "", *sections]))
        if out := own.out:
            drawn = advice.write_map(mapped, out.with_stem(f"{out.stem}_map"))
            pictures = [f"![map]({path.name})" for path in drawn if path.suffix == ".png"]
            scorecard.write(card, out, line.text, [*sections, *pictures, ""])
            print(f"wrote {', '.join(map(str, [out, *drawn]))}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
