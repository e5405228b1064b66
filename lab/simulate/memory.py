"""Memory of a rank in theory: weights, gradients, the optimizer's state and the exchange's buffers.

Activations are left out: a profile does not know them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from lab.exchange.cost import Sizes
from lab.model.profile import VALUE_BYTES, Profile
from lab.simulate.costs import exchange_of, extra_bytes
from lab.simulate.hardware import Hardware
from lab.simulate.load import Settings
from lab.simulate.strategy import Strategy, buckets
from lab.sync.pattern import class_of, pattern_of


def _local(s: Sizes, sync: Settings, e: Settings) -> float:
    """Add the anchor, and the outer momentum."""
    return extra_bytes(s, e) + 4 * s.n * (1 + (sync["outer_momentum"] > 0))


# Bytes besides weights, gradients and momentum, by class of sync: of the sizes, the sync's settings
# and the exchange.
SYNCS: dict[str, Callable[[Sizes, Settings, Settings], float]] = {
    "NoSync": lambda s, sync, e: 0,
    "GradSync": lambda s, sync, e: extra_bytes(s, e),
    # Its parts are views of gradients, which live until the next forward has applied them.
    "PrioritySync": lambda s, sync, e: extra_bytes(s, e),
    "LocalSync": _local,
    "StreamingSync": _local,
    "DesLoc": lambda s, sync, e: extra_bytes(s, e),
    # Only the root holds momentum.
    "RootUpdate": lambda s, sync, e: extra_bytes(s, e) - (4 * s.n if s.rank else 0),
    "Zero1": lambda s, sync, e: _zero1(s, e),
    # A second gradient, which is under way during the step.
    "DoubleBuffer": lambda s, sync, e: extra_bytes(s, e) + 4 * s.n * bool(sync["double_buffer"]),
    # DDP's buckets, to which gradients are copied, and back. The memory of its hooks is torch's.
    "DDPSync": lambda s, sync, e: 4 * s.n if sync.get("hook", "none") == "none" else math.nan,
}


def _zero1(sizes: Sizes, exchange: Mapping[str, Any]) -> float:
    """Count gradients in buckets, and what a reduce-scatter needs."""
    from lab.exchange.scatter import scatter_of  # with torch, which settings and help do not need

    return 4 * sizes.gathered + scatter_of(exchange_of(exchange)).memory_bytes(sizes)


def sync_bytes(sizes: Sizes, settings: Mapping[str, Any]) -> float:
    """Count the bytes that a rank needs besides weights, gradients and the whole optimizer's state.

    Args:
        settings: of a run, composed; `sync`, `exchange` and `optim` are read.

    Returns:
        NaN for a sync or an exchange of unknown memory, such as a user's own.
    """
    name = class_of(settings)
    if name not in SYNCS:
        return math.nan
    try:
        needed = SYNCS[name](sizes, settings["sync"], settings["exchange"])
    except ValueError:  # no exchange of the lab's
        return math.nan
    if pattern_of(settings).parts_the_update:  # others keep their part of the state
        needed -= VALUE_BYTES * sizes.n * state_copies(settings["optim"]) * (1 - 1 / sizes.N)
    return needed


def rank_bytes(
    profile: Profile,
    strategy: Strategy,
    settings: Mapping[str, Any],
    world_size: int,
    hardware: Hardware,
) -> float:
    """Count the bytes of the rank that needs most, without activations; NaN if unknown.

    Args:
        settings: of the run, composed; `optim`, `sync` and `exchange` are read.
        hardware: over whose library ranks talk, and whose nodes they share.
    """
    counts = [
        (len(bucket), sum(map(math.prod, bucket.values())))
        for bucket in buckets(profile, strategy.bucket_mb, hardware.on_gpu)
    ]
    values = profile.gradient_bytes // VALUE_BYTES
    of_model = VALUE_BYTES * values * (2 + state_copies(settings["optim"]))
    gathered = sum(size for number, size in counts if number > 1)
    largest = max(size for _, size in counts)
    first_and_last = {0, world_size - 1}  # a root, and a rank that is none
    local = min(world_size, hardware.ranks_per_node)
    ranks = (
        Sizes(values, gathered, largest, r, world_size, hardware.library, local=local)
        for r in first_and_last
    )
    return of_model + max(sync_bytes(sizes, settings) for sizes in ranks)


def state_copies(optim: Mapping[str, Any]) -> int:
    """Count the values that an optimizer keeps of each parameter: Adam two, momentum one."""
    if "betas" in optim or "beta1" in optim:
        return 2
    return int(bool(optim.get("momentum")))
