"""FSDP2 in two levels: groups of ranks, and a second shard of gathered weights in each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo

from lab.distributed import launcher
from lab.distributed.comm import Comm
from lab.distributed.nodes import Nodes
from lab.distributed.torch_comm import TorchComm
from lab.sync.fsdp_units import groups_of


@dataclass(frozen=True)
class Levels:
    """Groups of neighbouring ranks, and the ranks with one number in all of these."""

    inside: TorchComm
    across: TorchComm

    @classmethod
    def of(cls, comm: Comm, size: int) -> Levels:
        """Split `comm` into groups of `size`, a divisor of its ranks. A collective call."""
        inside, across = comm.split(comm.rank // size), comm.split(comm.rank % size)
        assert isinstance(inside, TorchComm) and isinstance(across, TorchComm)
        return cls(inside, across)

    def mesh(self) -> DeviceMesh:
        """Return torch's mesh [groups, ranks of a group]."""
        ranks = torch.arange(self.inside.size * self.across.size).view(-1, self.inside.size)
        groups, device = [self.across.group, self.inside.group], self.inside.device.type
        names = "replicate", "shard"
        return DeviceMesh.from_group(groups, device, mesh=ranks, mesh_dim_names=names)


class SecondShards:
    """Keeps gathered weights of FSDP units sharded inside groups from forward to backward.

    It is what fully_shard(reshard_after_forward=<int>) does, which would make process groups anew
    for each unit; here all units share those of `levels`.
    """

    def __init__(self, levels: Levels, units: Sequence[FSDPModule]) -> None:
        info = HSDPMeshInfo(levels.mesh(), shard_mesh_dim=1, replicate_mesh_dim=0)
        self._info, self._groups = info, [group for unit in units for group in groups_of(unit)]
        for group in self._groups:
            for parameter in group.fsdp_params:
                parameter.post_forward_mesh_info = info
                whole = torch.empty(parameter.sharded_param.shape, device="meta")
                parameter._init_sharded_post_forward_param_metadata(whole)
        self.use()

    def use(self) -> None:
        """Let units use it, also after set_reshard_after_forward."""
        for group in self._groups:
            group.post_forward_mesh_info = self._info


def levels_of_copies(shard_size: int | str | None, comm: TorchComm) -> Levels | None:
    """Return the groups that hold a copy of the weights each; None: there is one copy.

    Raises:
        ValueError: see FSDPSync.
    """
    size = shard_size if shard_size is not None else comm.size
    if shard_size == "node":
        size = launcher.local_size()
    size = _divisor("shard_size", size, shard_size, comm.size)
    return None if size == comm.size else Levels.of(comm, size)


def levels_of_second_shards(
    reshard: int | str | None, shard_size: int | str | None, comm: TorchComm
) -> Levels | None:
    """Return the groups that keep a second shard; None: nothing does.

    Raises:
        ValueError: see FSDPSync.
    """
    if reshard is None:
        return None
    key = f"sync.reshard={reshard}"
    if shard_size is not None:
        raise ValueError(f"{key}: sync.shard_size={shard_size} gathers within groups already")
    size = ranks_of_a_host(key, comm.nodes) if reshard == "node" else reshard
    size = _divisor("reshard", size, reshard, comm.size)
    if size == comm.size:
        return None
    if size == 1:
        raise ValueError(f"{key}: each rank would hold all weights; needs groups of 2 or more")
    return Levels.of(comm, size)


def levels_of_hosts(key: str, comm: TorchComm, known: Levels | None) -> Levels | None:
    """Return the hosts' ranks as two levels; None: there is one, all on a host or all alone.

    Args:
        key: the setting that needs them, for messages.
        known: groups that may be those.

    Raises:
        ValueError: see `ranks_of_a_host`.
    """
    size = ranks_of_a_host(key, comm.nodes)
    if size in (1, comm.size):
        return None
    return known if known and known.inside.size == size else Levels.of(comm, size)


def ranks_of_a_host(key: str, nodes: Nodes) -> int:
    """Return how many ranks each host has.

    Raises:
        ValueError: they have different numbers, or are not numbered one host after the other.
    """
    size, found = len(nodes[0]), [list(node) for node in nodes]
    if found != [list(range(at, at + size)) for at in range(0, len(nodes) * size, size)]:
        listed = ", ".join(map(str, found))
        raise ValueError(
            f"{key}: hosts have the ranks {listed}; each needs as many, numbered one host after "
            "the other"
        )
    return size


def _divisor(key: str, size: object, setting: object, ranks: int) -> int:
    if not isinstance(size, int) or isinstance(size, bool) or size < 1 or ranks % size:
        raise ValueError(
            f"sync.{key}={setting}: must be node, null, or a divisor of the {ranks} ranks"
        )
    return size
