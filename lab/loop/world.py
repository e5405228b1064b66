"""A World beside the process groups of a user's own program."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from lab.distributed.launcher import RankInfo, was_launched
from lab.distributed.torch_comm import TorchComm, nccl_options
from lab.distributed.world import World


def world_of(
    group: dist.ProcessGroup | None, device: torch.device, timeout_s: float = 300.0
) -> World:
    """Make process groups of the same ranks as `group`, for the lab alone. A collective call.

    The program's own collectives and the lab's then need no common order.

    Args:
        group: a process group that this rank is in; None: all ranks that a launcher started, whose
            default group is made if the program has not. Ranks outside need not call this.
        device: where tensors to exchange lie.
        timeout_s: longest time of a collective.
    """
    group = group or _default_group()
    ranks = dist.get_process_group_ranks(group)
    limit = timedelta(seconds=timeout_s)
    backend = _backend(group, device)
    control = _beside(ranks, "gloo", limit)
    if backend == "nccl":
        main = _beside(ranks, "nccl", limit, nccl_options(limit))
        comm = TorchComm(main, main, device, limit)
    else:
        beside, second = _beside(ranks, backend, limit), _beside(ranks, backend, limit)
        comm = TorchComm(beside, second, device, limit)
    place, comm.nodes = _place(control)
    store = dist.PrefixStore("lab", place.store)
    return World(place, device, store, comm, control, len(comm.nodes))


def _default_group() -> dist.ProcessGroup:
    if not dist.is_initialized():
        alone: dict[str, Any] = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        dist.init_process_group(**({} if was_launched() else alone))
    group = dist.group.WORLD
    assert group is not None  # it is initialised
    return group


def _backend(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the backend of `group` for tensors on `device`."""
    config = dist.get_backend_config(group)  # such as cpu:gloo,cuda:nccl
    return dict(entry.split(":") for entry in config.split(","))[device.type]


def _beside(
    ranks: list[int], backend: str, limit: timedelta, options: Any = None
) -> dist.ProcessGroup:
    group = dist.new_group(
        ranks, limit, backend, pg_options=options, use_local_synchronization=True
    )
    assert isinstance(group, dist.ProcessGroup)  # this rank is one of them
    return group


def _place(control: dist.ProcessGroup) -> tuple[RankInfo, list[list[int]]]:
    """Return this rank's place among those of `control`, and the ranks of each node."""
    hosts: list[Any] = [None] * control.size()
    # torchrun's number of a node tells apart those that are emulated on one host.
    node = socket.gethostname(), os.environ.get("GROUP_RANK")
    dist.all_gather_object(hosts, node, control)
    rank = control.rank()
    nodes = [[at for at, host in enumerate(hosts) if host == one] for one in dict.fromkeys(hosts)]
    beside = next(node for node in nodes if rank in node)
    launcher = "torchrun" if dist.is_torchelastic_launched() else "env"
    launcher = launcher if was_launched() else "python"
    store = cast(Any, distributed_c10d)._get_default_store()
    local_rank, local_size = beside.index(rank), len(beside)
    return RankInfo(launcher, rank, control.size(), local_rank, local_size, store), nodes
