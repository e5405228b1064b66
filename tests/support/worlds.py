"""A rank's view of a run without real other ranks."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist

from lab.distributed.launcher import RankInfo
from lab.distributed.world import World

CPU = torch.device("cpu")


def one_of(size: int, device: torch.device = CPU) -> World:
    """Return rank 0 of `size`, with a store of its own; the other ranks never answer."""
    place = RankInfo("python", 0, size, 0, size, dist.HashStore())
    nothing = cast(Any, None)
    return World(place, device, dist.PrefixStore("lab", place.store), nothing, nothing, num_hosts=1)
