"""Alike: the kinds of own work in which all ranks have the same to do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from lab.measure.spans import OWN
from lab.settings.names import class_name
from lab.sync.pattern import Leg, pattern_of

# Exchanges in which a rank works for others: a root, a parent, or a matrix's owner.
FOR_OTHERS = ("Tree", "DoubleTree", "Star", "Muon")
UNEVEN = 1.05  # ranks of which one sends so many times as much as another differ in their work


def alike(settings: Mapping[str, Any], payload_bytes: Sequence[float] = ()) -> list[str]:
    """List those of OWN in which a rank that takes longer is slow, and does not merely do more.

    Args:
        settings: a run's composed settings; `exchange`, `sync` and `overlap` are read.
        payload_bytes: of each rank in a step, if known. Two levels on nodes of different sizes give
            some ranks more to send than others.
    """
    pattern = pattern_of(settings)
    unlike = set[str]()
    if Leg.WEIGHTS_FROM_ROOT in pattern.legs:
        unlike |= {"exchange", "update"}  # the root alone updates
    if pattern.gathers_units:
        unlike |= {"update"}  # ranks have whole rows: of a small matrix some have none
    classes = [class_name(path) for path in _targets(settings.get("exchange", {})) if path]
    if any(name in FOR_OTHERS or "." in name for name in classes):  # a user's may do anything
        unlike |= {"exchange"}
    if payload_bytes and max(payload_bytes) > UNEVEN * min(payload_bytes):
        unlike |= {"exchange"}
    return [name for name in OWN if name not in unlike]


def _targets(exchange: Mapping[str, Any]) -> Iterator[str]:
    """Yield the class of an exchange, and those of the exchanges that it is made of."""
    yield f"{exchange.get('_target_', '')}"
    for part in exchange.values():
        if isinstance(part, Mapping):
            yield from _targets(cast(Mapping[str, Any], part))
