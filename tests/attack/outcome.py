"""What became of an attempt, and the table of all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from lab.draw.text import markdown

SURVIVED, REFUSED = "survived", "refused in one line"
BAD = ("lost", "hung", "silent", "traceback", "code run", "secret", "memory")
OUTCOMES = (SURVIVED, REFUSED, *BAD)


@dataclass(frozen=True)
class Attempt:
    """One attack.

    Attributes:
        attack: its class, a line of the table.
        what: enough to repeat it.
        outcome: one of OUTCOMES.
        said: the line that refused it, or the error.
    """

    attack: str
    what: str
    outcome: str
    said: str = ""


def table(attempts: Iterable[Attempt]) -> str:
    """Count outcomes by class, as Markdown."""
    counts: dict[str, Counter[str]] = {}
    for attempt in attempts:
        counts.setdefault(attempt.attack, Counter())[attempt.outcome] += 1
    rows = [
        [attack, *map(str, (found.total(), *(found[outcome] for outcome in OUTCOMES)))]
        for attack, found in counts.items()
    ]
    return "\n".join(markdown(["attack", "tried", *OUTCOMES], rows))
