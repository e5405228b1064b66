"""What launchers say in the environment. Nothing here imports torch."""

from __future__ import annotations

import os


def world_size() -> int:
    """Number of ranks, before any of them has met another."""
    return int(os.environ.get("HOROVOD_SIZE") or os.environ.get("WORLD_SIZE") or 1)


def was_launched() -> bool:
    """Whether a launcher has started this process as a rank."""
    return "HOROVOD_RANK" in os.environ or "RANK" in os.environ


def is_first_rank() -> bool:
    """Whether this process is rank 0, before any rank has met another."""
    return (os.environ.get("HOROVOD_RANK") or os.environ.get("RANK") or "0") == "0"


def launch_id(arguments: list[str]) -> str | None:
    """The same for all starts of a command in one job, and for no other; None without a job.

    A job is what torchrun's --rdzv-id or launch/slurm.sbatch, by LAB_JOB, names so.
    How often it was started cannot be read: torchrun counts only the failures that each node saw.
    """
    job = os.environ.get("LAB_JOB") or os.environ.get("TORCHELASTIC_RUN_ID")
    if job is None or job == "none":  # torchrun's name for a job that was given none
        return None
    return " ".join([job, *arguments])
