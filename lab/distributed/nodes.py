"""A rank's place among those started together, and nodes: which ranks share a host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

Nodes = Sequence[Sequence[int]]  # the ranks of each node, in rank order


@dataclass(frozen=True)
class RankInfo:
    """One rank among those started together.

    Attributes:
        launcher: "torchrun", "horovodrun", "python" (no launcher, one rank), or "env" (something
            else set RANK and the like, such as srun in launch/slurm.sbatch).
        store: key-value store that all ranks reach.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    store: dist.Store


def nodes_of(places: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Group ranks by node.

    Launchers number the ranks of a node upwards, whether they fill one node after the other or go
    round them. So the k-th rank with local rank l is on the k-th of the nodes with more than l.

    Args:
        places: local_rank and local_size of each rank, in rank order.

    Raises:
        ValueError: no launcher would number ranks so.
    """
    sizes = [size for local_rank, size in places if local_rank == 0]
    nodes: list[list[int]] = [[] for _ in sizes]
    for local_rank in range(max(sizes, default=0)):
        there = [node for node, size in zip(nodes, sizes, strict=True) if size > local_rank]
        ranks = [rank for rank, place in enumerate(places) if place[0] == local_rank]
        for node, rank in zip(there, ranks, strict=False):
            node.append(rank)
    if [len(node) for node in nodes] != sizes or sum(sizes) != len(places):
        numbered = ", ".join(f"{local} of {size}" for local, size in places)
        raise ValueError(
            f"LOCAL_RANK of LOCAL_WORLD_SIZE: the {len(places)} ranks have {numbered}; a node of n "
            "ranks has 0 to n-1 of n"
        )
    return nodes


def each_alone(size: int) -> list[list[int]]:
    """Return nodes of one rank each."""
    return [[rank] for rank in range(size)]


def restricted(nodes: Nodes, members: Sequence[int]) -> list[list[int]]:
    """Return the nodes of a group, whose ranks are numbered in the order of `members`."""
    number = {rank: index for index, rank in enumerate(members)}
    kept = ([number[rank] for rank in node if rank in number] for node in nodes)
    return [node for node in kept if node]
