"""Time each layer of a model: `python -m lab.profile_layers model=alexnet_small`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from lab.device.profile_request import profile_file, read
from lab.settings.command import Command, CommandLine, answers, show
from lab.settings.errors import as_config_error
from lab.settings.fields import fields_of, parsed, setting, split


@dataclass(frozen=True)
class ProfileSettings:
    """The settings of lab.profile_layers beside a run's."""

    out: Path | None = setting(
        "null",
        "FILE.yaml for the profile, which profile=FILE.yaml opens",
        parse=lambda _, text: profile_file(text),
    )


COMMAND = Command(
    "lab.profile_layers",
    """\
Measure the forward and backward time of each layer of a model, and the time of the rest of a step.
The result is called a profile. model=replay imitates its times, and lab.predict reads them. To
separate each time into a fixed part and a part per sample, list several batch sizes, as in
batch_size=16,32,64. A single batch size is measured together with a quarter of it.""",
    (
        "python -m lab.profile_layers model=lenet",
        "python -m lab.profile_layers model=alexnet_small batch_size=16,32,64 out=mine.yaml",
        "python -m lab.profile_layers model=alexnet data=synthetic 'data.shape=[3,224,224]' "
        "batch_size=256 precision=bf16",
    ),
    ProfileSettings,
    runs=True,
)


@answers(COMMAND)
def main(line: CommandLine) -> int:
    """Measure one model; print a table, and write the profile to `out=FILE.yaml` or print it too.

    Returns:
        0; 2 for a wrong setting; 130 after Ctrl-C.
    """
    texts, settings = split(line.settings, fields_of(ProfileSettings))
    out = parsed(ProfileSettings, texts).out
    configs = read(settings)
    if line.shows_settings:
        return show(configs[:1], line.flags)
    # torch is imported only here: help and wrong settings are answered without it.
    from lab.device.profile import measure, present

    profile, notes = measure(configs, out.stem if out else "measured", settings)
    with as_config_error(f"out={out}: cannot be written: ", OSError):
        present(profile, notes, out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
