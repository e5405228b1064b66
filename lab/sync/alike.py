"""Alike: the kinds of own work in which all ranks have the same to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lab.measure.spans import OWN
from lab.sync.pattern import Leg, pattern_of

THROUGH_A_ROOT = (".tree.", ".tree_double.", ".star.")  # modules of exchanges


def alike(settings: Mapping[str, Any]) -> list[str]:
    """List those of OWN in which a rank that takes longer is slow, and does not merely do more.

    Args:
        settings: a run's composed settings; `exchange`, `sync` and `overlap` are read.
    """
    target = f"{settings.get('exchange', {}).get('_target_', '')}"
    unlike = set[str]()
    if Leg.WEIGHTS_FROM_ROOT in pattern_of(settings).legs:
        unlike = {"exchange", "update"}  # the root alone updates
    elif any(name in target for name in THROUGH_A_ROOT):
        unlike = {"exchange"}
    return [name for name in OWN if name not in unlike]
