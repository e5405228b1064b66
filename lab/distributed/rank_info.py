"""A rank's place among those that were started with it, and where they meet."""

from __future__ import annotations

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
