"""On one rank, strategies that send gradients as they are do the same.

They have nothing to send, so their weights are equal to the bit, and their step times differ by the
cost of buckets and hooks, and by noise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lab.settings.names import class_name, root_of

# The lab's classes of exchanges and syncs that add nothing to the step of one rank.
EXACT = ("NoExchange", "AllReduce", "Tree", "DoubleTree", "Ring", "Star")
PLAIN = ("NoSync", "GradSync", "RootUpdate")
OF_EXCHANGE = ("exchange", "sync", "overlap", "bucket_mb")

Computation = frozenset[tuple[str, str]]


def adds_nothing(exchange: str, sync: str) -> bool:
    """Return whether an exchange and a sync, by class name, add nothing to one rank's step."""
    return exchange in EXACT and sync in PLAIN


def idle_groups(compiled: object) -> tuple[str, ...]:
    """Return the groups and settings that then change nothing on one rank.

    Args:
        compiled: the setting `compile`; torch.compile divides a model that overlaps by buckets.
    """
    return ("exchange", "sync") if str(compiled) == "True" else OF_EXCHANGE


def computation(resolved: Mapping[str, Any]) -> Computation | None:
    """Return what a run's settings compute on one rank: equal ones are the same computation.

    None if its strategy does something of its own even there: compresses, averages weights, leaves
    gradients to a library.

    Args:
        resolved: of a composed run; see lab.settings.names.resolved.
    """
    exchange, sync = (
        class_name(str(resolved.get(f"{group}._target_", ""))) for group in ("exchange", "sync")
    )
    if not adds_nothing(exchange, sync):
        return None
    idle = idle_groups(resolved.get("compile"))
    return frozenset((k, str(v)) for k, v in resolved.items() if root_of(k) not in idle)
