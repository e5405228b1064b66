"""The list in docs/how-to/cuda_graph.md of what graph=true refuses, made from the rules.

python -m tests.support.refused
"""

from __future__ import annotations

import re
from pathlib import Path

from lab.draw.chart import order
from lab.settings.config import build, load
from lab.settings.files import choices_of
from lab.sync.pattern import pattern_of
from lab.training.graph import REFUSALS, no_graph

PAGE = Path(__file__).resolve().parents[2] / "docs/how-to/cuda_graph.md"
HEADER = ["| setting | why the lab rejects it with `graph=true` |", "|---|---|"]
TABLE = re.compile(r"@@TABLE@@|" + re.escape(HEADER[0]) + r"\n(?:\|.*\n)+")


def refusal_of(strategy: str) -> str:
    """Return why no step of a strategy can be captured; empty: one can."""
    config = load([f"strategy={strategy}"])
    return no_graph(pattern_of(config), build(config.exchange))


def table() -> str:
    refused: dict[str, list[str]] = {}
    for name in sorted(choices_of("strategy"), key=order):
        if why := refusal_of(name):
            refused.setdefault(why, []).append(f"`{name}`")
    rows = [f"| `{rule.settings.replace(' or ', '` or `')}` | {rule.why} |" for rule in REFUSALS]
    for why, names in refused.items():
        rows.append(f"| `strategy=` set to {', '.join(names)} | {why} |")
    return "\n".join([*HEADER, *rows]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(TABLE.sub(lambda _: table(), PAGE.read_text()))
