"""The table of strategies in docs/reference/strategies.md, made from conf/strategy.

    python -m tests.support.strategy_table

A strategy's file begins with lines of comment: its text, and the bytes that the busiest rank sends.
"""

from __future__ import annotations

import re
from pathlib import Path

from lab.draw.chart import order
from lab.settings.files import choices_of, conf_dir

PAGE = Path(__file__).resolve().parents[2] / "docs/reference/strategies.md"
COMMENT = re.compile(r"^# @package _global_\n((?:#.*\n)+)")
BYTES = "Bytes sent: "
HEADER = ["| `strategy=` | what happens | bytes sent |", "|---|---|---|"]
TABLE = re.compile(r"(?<=\n)\| `strategy=` \|.*\n(?:\|.*\n)+")


def about(name: str) -> tuple[str, str]:
    """Return a strategy's text, and its bytes."""
    path = conf_dir() / "strategy" / f"{name}.yaml"
    return about_of(path.read_text(), f"conf/strategy/{name}.yaml")


def about_of(content: str, path: str) -> tuple[str, str]:
    """Return the same of a file's content.

    Raises:
        ValueError: it lacks either.
    """
    found = COMMENT.match(content)
    lines = [line.removeprefix("#").strip() for line in found[1].splitlines()] if found else []
    text, _, sent = " ".join(lines).partition(BYTES)
    if not text or not sent:
        raise ValueError(f"{path}: must say `# TEXT` and `# {BYTES}FORMULA`")
    return text.strip(), sent


def table() -> str:
    names = sorted(choices_of("strategy"), key=order)
    rows = [f"| `{name}` | {' | '.join(about(name))} |" for name in names]
    return "\n".join([*HEADER, *rows]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(TABLE.sub(lambda _: table(), PAGE.read_text()))
