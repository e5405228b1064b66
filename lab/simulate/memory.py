"""Memory of a rank in theory: weights, gradients, the optimizer's state and the exchange's buffers.

Activations are left out: a profile does not know them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from lab.model.profile import VALUE_BYTES, Profile
from lab.simulate.costs import extra_bytes
from lab.simulate.load import Settings, Sizes
from lab.simulate.step import Strategy, buckets
from lab.sync.pattern import class_of

# Bytes besides weights, gradients and momentum, by class of sync: of the sizes, the sync's settings
# and the exchange.
SYNCS: dict[str, Callable[[Sizes, Settings, Settings], float]] = {
    "NoSync": lambda s, sync, e: 0,
    "GradSync": lambda s, sync, e: extra_bytes(s, e),
    # Its parts are views of gradients, which live until the next forward has applied them.
    "PrioritySync": lambda s, sync, e: extra_bytes(s, e),
    # The anchor, and the outer momentum.
    "LocalSync": lambda s, sync, e: (
        extra_bytes(s, e) + 4 * s.n * (1 + (sync["outer_momentum"] > 0))
    ),
    # Only the root holds momentum.
    "RootUpdate": lambda s, sync, e: extra_bytes(s, e) - (4 * s.n if s.rank else 0),
    # A second gradient, which is under way during the step.
    "DoubleBuffer": lambda s, sync, e: extra_bytes(s, e) + 4 * s.n * bool(sync["double_buffer"]),
    # DDP's buckets, to which gradients are copied, and back. The memory of its hooks is torch's.
    "DDPSync": lambda s, sync, e: 4 * s.n if sync.get("hook", "none") == "none" else math.nan,
}


def sync_bytes(sizes: Sizes, settings: Mapping[str, Any]) -> float:
    """Count the bytes that a rank needs besides weights, gradients and momentum.

    Args:
        settings: of a run, composed; `sync` and `exchange` are read.

    Returns:
        NaN for a sync of unknown memory.
    """
    name = class_of(settings)
    if name not in SYNCS:
        return math.nan
    return SYNCS[name](sizes, settings["sync"], settings["exchange"])


def rank_bytes(
    profile: Profile, strategy: Strategy, settings: Mapping[str, Any], world_size: int, library: str
) -> float:
    """Count the bytes of the rank that needs most, without activations; NaN if unknown.

    Args:
        settings: of the run, composed; `optim`, `sync` and `exchange` are read.
        library: over which ranks talk (see Hardware).
    """
    counts = [
        (len(bucket), sum(map(math.prod, bucket.values())))
        for bucket in buckets(profile, strategy.bucket_mb)
    ]
    values = profile.gradient_bytes // VALUE_BYTES
    of_model = VALUE_BYTES * values * (2 + state_copies(settings["optim"]))
    gathered = sum(size for number, size in counts if number > 1)
    largest = max(size for _, size in counts)
    first_and_last = {0, world_size - 1}  # a root, and a rank that is none
    ranks = (Sizes(values, gathered, largest, r, world_size, library) for r in first_and_last)
    return of_model + max(sync_bytes(sizes, settings) for sizes in ranks)


def state_copies(optim: Mapping[str, Any]) -> int:
    """Count the values that an optimizer keeps of each parameter: Adam two, momentum one."""
    if "betas" in optim or "beta1" in optim:
        return 2
    return int(bool(optim.get("momentum")))
