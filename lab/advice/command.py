"""The command that trains a cell."""

from __future__ import annotations

import shlex

from lab.study.grid import Cell

RENDEZVOUS = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "HOST:29400"]  # HOST: the first node


def train_command(cell: Cell, ranks_per_node: int) -> str:
    """Return the command line of lab.train for a cell.

    Args:
        ranks_per_node: more ranks are divided among nodes, on each of which the command runs.
    """
    settings = list(cell.arguments)
    if cell.cluster and cell.config.cluster.hosts is None:
        settings.append(f"cluster.hosts={cell.cluster.num_hosts}")
    return shlex.join([*_launcher(cell, ranks_per_node), "-m", "lab.train", *settings])


def _launcher(cell: Cell, ranks_per_node: int) -> list[str]:
    size = cell.world_size
    if cell.over_horovod:
        return ["horovodrun", "-np", str(size), "python"]
    if cell.cluster or size == 1:
        return ["python"]
    if size <= ranks_per_node:
        return ["torchrun", "--nproc-per-node", str(size)]
    nodes = ["--nnodes", str(-(-size // ranks_per_node)), "--nproc-per-node", str(ranks_per_node)]
    return ["torchrun", *nodes, *(RENDEZVOUS)]
