"""The command line of a checklist."""

from __future__ import annotations

from dataclasses import dataclass

from lab.settings.command import Command
from lab.settings.errors import ConfigError
from lab.settings.fields import setting


def _page(key: str, text: str) -> str | None:
    if text != "null" and not text.endswith(".md"):
        raise ConfigError(f"{key}={text}: must name FILE.md")
    return None if text == "null" else text


@dataclass(frozen=True)
class Settings:
    """The settings of lab.first_hour; None: the machine's default."""

    items: tuple[str, ...] | None = setting(None, "numbers or parts, as in items=1,4,6a; null: all")
    time_limit_s: int = setting(
        570, "for an item; a longer one is ended, and fails", unit="seconds", at_least=1
    )
    out: str | None = setting(
        "null",
        "FILE.md, FILE.json and a folder next to it; null: docs/results/gpu-NAME",
        parse=_page,
    )


COMMAND = Command(
    "lab.first_hour",
    """\
Run the checklist of the first hour on GPUs, from a checkout's root: items 1 to 9 need one GPU,
10 to 15 several. Each figure is printed with its expected range, and a page is written. Parts that
are run separately, by items=, are added to the same page.""",
    ("python -m lab.first_hour", "python -m lab.first_hour items=1,4,6a out=mine.md"),
    Settings,
    stopped="stopped; the page has the finished items",
)
