"""Facts that must be equal on all ranks, compared before anything depends on them.

Ranks that were started with unlike settings, code or data would hang in an exchange, or train to
the end and leave a record that is true of rank 0 alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import groupby

import torch.distributed as dist

from lab.distributed.nodes import RankInfo

Facts = Mapping[str, str]  # what a rank states, by name

MOST_NAMED = 4  # facts that differ; of the others, the line gives the number
HEARD_S = 5.0  # for all ranks to read what differs
LONGEST = 80  # characters of a value in the line


class Disagreement(ValueError):
    """Ranks state unlike facts. All of them have this error, with the same line."""


def written(facts: Facts) -> str:
    """Write facts as a text, equal for equal ones."""
    return json.dumps(dict(facts), sort_keys=True)


def compare_in_store(place: RankInfo, key: str, limit: timedelta) -> None:
    """Compare facts before ranks connect: each has set `key`/its number to them, as written.

    Raises:
        Disagreement: names what differs, with the values and their ranks.
    """
    store, verdict = place.store, f"{key}/verdict"
    heard = [f"{key}/heard/{rank}" for rank in range(place.size)]
    if place.rank == 0:
        texts = [store.get(f"{key}/{rank}").decode() for rank in range(place.size)]
        store.set(verdict, differences([json.loads(text) for text in texts]))
    store.wait([verdict], limit)
    if line := store.get(verdict).decode():
        store.set(heard[place.rank], "")
        if place.rank == 0:  # the store may be in this process, and end with it
            with suppress(dist.DistError):
                store.wait(heard, timedelta(seconds=HEARD_S))
        raise Disagreement(line)


def differences(stated: Sequence[Facts]) -> str:
    """Return one line that names what differs, with each value and its ranks; empty: nothing does.

    Args:
        stated: the facts of each rank, in rank order.
    """
    names = dict.fromkeys(name for facts in stated for name in facts)
    names = sorted(names, key=lambda name: name.count("."))  # strategy before exchange.threshold
    unlike = [name for name in names if len({facts.get(name) for facts in stated}) > 1]
    if not unlike:
        return ""
    parts = [f"{name}: {_by_value(name, stated)}" for name in unlike[:MOST_NAMED]]
    if more := len(unlike) - len(parts):
        parts.append(f"and {more} more")
    return f"{'; '.join(parts)}; must be equal on all ranks"


def _by_value(name: str, stated: Sequence[Facts]) -> str:
    ranks: dict[str | None, list[int]] = {}
    for rank, facts in enumerate(stated):
        ranks.setdefault(facts.get(name), []).append(rank)
    return ", ".join(f"{_short(value)} on {ranks_in_words(on)}" for value, on in ranks.items())


def _short(value: str | None) -> str:
    if value is None:
        return "nothing"
    if len(value) <= LONGEST:
        return value
    return f"{value[:LONGEST]}… ({hashlib.sha256(value.encode()).hexdigest()[:6]})"


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return "rank 3", or "ranks 0-1, 4", of numbers in ascending order."""
    runs = []
    for _, run in groupby(enumerate(ranks), lambda pair: pair[1] - pair[0]):
        first, *rest = [rank for _, rank in run]
        runs.append(f"{first}-{rest[-1]}" if rest else str(first))
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(runs)}"
