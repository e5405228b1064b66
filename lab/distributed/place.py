"""A rank's place among those that were started with it, and where they meet."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class Place:
    """One rank's place among those that were started with it.

    Attributes:
        launcher: "torchrun", "horovodrun", "python" (no launcher, one rank), or "env": whoever set
            RANK and its kin, such as srun in launch/slurm.sbatch.
        store: key-value store that all of them reach.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    store: dist.Store


def find_place() -> Place:
    """This process's place, from what its launcher put into the environment."""
    if "HOROVOD_RANK" in os.environ:
        from lab.distributed.horovod_comm import find_place as find

        return find()
    if "RANK" not in os.environ:
        return Place("python", 0, 1, 0, 1, dist.HashStore())
    store, rank, size = next(iter(dist.rendezvous("env://")))
    local_rank, local_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    launcher = "torchrun" if "TORCHELASTIC_RUN_ID" in os.environ else "env"
    return Place(launcher, rank, size, local_rank, local_size, store)
