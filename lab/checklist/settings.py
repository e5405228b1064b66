"""What the command line of a checklist may say."""

from __future__ import annotations

from dataclasses import dataclass

from lab.settings.config import ConfigError

DEFAULTS = {"items": "null", "time_limit_s": "570", "out": "null"}
HELP = f"""\
usage: python -m lab.first_hour [setting=value ...]

Run the checklist of the first hour on GPUs, from a checkout's root: items 1 to 9 need one GPU,
10 to 15 several. Each figure is printed beside what is expected, and a page is written. What is run
in parts, by items=, adds up on the same page.

settings:
  items=null         numbers or parts, as in items=1,4,6a; null: all
  time_limit_s={DEFAULTS["time_limit_s"]}   what takes longer is ended, and has failed
  out=null           FILE.md; null: docs/results/gpu-NAME.md. FILE.json and a folder go beside it
"""


@dataclass(frozen=True)
class Settings:
    """A command line, parsed; None: the default of the machine."""

    items: list[str] | None
    time_limit_s: int
    out: str | None


def read(arguments: list[str]) -> Settings:
    """The settings in `key=value` arguments.

    Raises:
        ConfigError: a key that is none, or a value out of range.
    """
    texts = dict(DEFAULTS)
    for argument in arguments:
        key, _, text = argument.partition("=")
        if key not in DEFAULTS or not text:
            raise ConfigError(f"{argument}: allowed are {', '.join(DEFAULTS)} (--help)")
        texts[key] = text
    limit, out = texts["time_limit_s"], texts["out"]
    if not limit.isdigit() or int(limit) < 1:
        raise ConfigError(f"time_limit_s={limit}: must be an integer of at least 1")
    if out != "null" and not out.endswith(".md"):
        raise ConfigError(f"out={out}: must name FILE.md")
    items = None if texts["items"] == "null" else texts["items"].strip("[]").split(",")
    return Settings(items, int(limit), None if out == "null" else out)
