"""The command line of a checklist."""

from __future__ import annotations

from dataclasses import dataclass

from lab.settings.command import Command
from lab.settings.errors import ConfigError

COMMAND = Command(
    "lab.first_hour",
    """\
Run the checklist of the first hour on GPUs, from a checkout's root: items 1 to 9 need one GPU,
10 to 15 several. Each figure is printed with its expected range, and a page is written. Parts that
are run separately, by items=, are added to the same page.""",
    ("python -m lab.first_hour", "python -m lab.first_hour items=1,4,6a out=mine.md"),
    {
        "items": ("null", "numbers or parts, as in items=1,4,6a; null: all"),
        "time_limit_s": ("570", "seconds for an item; a longer one is ended, and fails"),
        "out": ("null", "FILE.md, FILE.json and a folder next to it; null: docs/results/gpu-NAME"),
    },
    stopped="stopped; the page has the finished items",
)


@dataclass(frozen=True)
class Settings:
    """A parsed command line; None: the machine's default."""

    items: list[str] | None
    time_limit_s: int
    out: str | None


def read(arguments: list[str]) -> Settings:
    """Read the settings in `key=value` arguments.

    Raises:
        ConfigError: an unknown key, or a value out of range.
    """
    texts = COMMAND.texts(arguments)
    limit, out = texts["time_limit_s"], texts["out"]
    if not limit.isdigit() or int(limit) < 1:
        raise ConfigError(f"time_limit_s={limit}: must be an integer of at least 1")
    if out != "null" and not out.endswith(".md"):
        raise ConfigError(f"out={out}: must name FILE.md")
    items = None if texts["items"] == "null" else texts["items"].strip("[]").split(",")
    return Settings(items, int(limit), None if out == "null" else out)
