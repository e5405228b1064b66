"""A rank's view of a run without real other ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist

from lab.distributed.launcher import RankInfo
from lab.distributed.world import World

CPU = torch.device("cpu")


def one_of(size: int, device: torch.device = CPU) -> World:
    """Return rank 0 of `size`, with a store of its own; the other ranks never answer."""
    place = RankInfo("python", 0, size, 0, size, dist.HashStore())
    comm = cast(Any, SimpleNamespace(nodes=[[*range(size)]]))
    return World(place, device, dist.PrefixStore("lab", place.store), comm, cast(Any, None))
