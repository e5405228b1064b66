"""Settings under a condition: `strategy=onebit:exchange.threshold=zero,mean`.

The setting behind the colon applies only to the cells that have the one before it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from lab.settings.errors import ConfigError
from lab.study.lists import expanded

# Outside quotes, no value of Hydra's grammar has an equals sign.
UNDER = re.compile(r"(?P<given>[\w.]+=[^:=,\s'\"\[{]+):(?P<setting>[~+]*(?P<key>[\w.@]+)=.*)")


@dataclass(frozen=True)
class Condition:
    """A setting, and the one that a cell must have for it to apply.

    Attributes:
        text: as typed.
        given: the setting of the cell, such as strategy=onebit.
        key: the key that is set in such a cell.
        settings: its values, as a command line would take them.
    """

    text: str
    given: str
    key: str
    settings: tuple[str, ...]


def separate(
    arguments: Sequence[str], of_sweep: Collection[str]
) -> tuple[list[Condition], list[str]]:
    """Separate settings under a condition from all others; the last one of a key counts.

    Args:
        of_sweep: keys that belong to the sweep and not to a cell.

    Raises:
        ConfigError: a condition sets one of these.
    """
    conditions, others = dict[tuple[str, str], Condition](), list[str]()
    for argument in arguments:
        if not (found := UNDER.fullmatch(argument)):
            others.append(argument)
            continue
        given, key = found["given"], found["key"]
        if key in of_sweep or key == given.partition("=")[0]:
            raise ConfigError(f"{argument}: a condition cannot set {key}")
        ((_, settings),) = expanded([found["setting"]]).items()
        conditions[given, key] = Condition(argument, given, key, tuple(settings))
    return list(conditions.values()), others


def under(
    conditions: Sequence[Condition], arguments: tuple[str, ...], world_size: int
) -> list[tuple[str, ...]]:
    """Return the arguments of the cells that a cell becomes under the conditions which it meets.

    A setting under a condition replaces that of the same key.
    """
    met = [c for c in conditions if c.given in (*arguments, f"world_size={world_size}")]
    keys = {condition.key for condition in met}
    kept = [a for a in arguments if a.lstrip("~+").partition("=")[0] not in keys]
    return [(*kept, *chosen) for chosen in itertools.product(*(c.settings for c in met))]


def refuse_idle(
    conditions: Sequence[Condition], points: Sequence[tuple[tuple[str, ...], int]]
) -> None:
    """Refuse a condition that no cell meets.

    Args:
        points: arguments and world size of each cell.

    Raises:
        ConfigError: the message names the condition, and what cells have instead.
    """
    had = dict.fromkeys(
        setting for arguments, size in points for setting in (*arguments, f"world_size={size}")
    )
    for condition in conditions:
        if condition.given in had:
            continue
        key = condition.given.partition("=")[0]
        others = ", ".join(s for s in had if s.partition("=")[0] == key)
        rest = f"cells have {others}" if others else f"the grid does not set {key}"
        raise ConfigError(f"{condition.text}: no cell has {condition.given}; {rest}")
