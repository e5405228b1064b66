"""RankInfo: this rank's number and host-local number, and the store that all ranks share."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist


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
