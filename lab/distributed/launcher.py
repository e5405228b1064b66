"""Variables that launchers put into the environment. Nothing here imports torch."""

from __future__ import annotations

import os
import signal
import sys


def world_size() -> int:
    """Return the number of ranks; they need not have joined yet."""
    return int(os.environ.get("HOROVOD_SIZE") or os.environ.get("WORLD_SIZE") or 1)


def local_size() -> int:
    """Return the number of ranks on this host."""
    return int(os.environ.get("HOROVOD_LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or 1)


def was_launched() -> bool:
    """Return whether a launcher started this process as a rank."""
    return "HOROVOD_RANK" in os.environ or "RANK" in os.environ


def is_first_rank() -> bool:
    """Return whether this process is rank 0; the ranks need not have joined yet."""
    return (os.environ.get("HOROVOD_RANK") or os.environ.get("RANK") or "0") == "0"


def end_on_signals(command: str) -> None:
    """End at SIGTERM or SIGUSR1 with a line, until a run's watchdog takes these signals."""

    def end(number: int, _frame: object) -> None:
        name = signal.Signals(number).name
        if is_first_rank():
            line = f"{command}: error: stopped by {name} before the run had begun\n"
            os.write(sys.stderr.fileno(), line.encode())
        os._exit(1)  # not 75: a job whose time ends here would be requeued forever

    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, end)


def launch_id(arguments: list[str]) -> str | None:
    """Identify all starts of one command within one job; None without a job.

    torchrun's --rdzv-id names a job, or LAB_JOB, which launch/slurm.sbatch sets. The number of
    starts cannot be read: torchrun counts only the failures that each node saw.
    """
    job = os.environ.get("LAB_JOB") or os.environ.get("TORCHELASTIC_RUN_ID")
    if job is None or job == "none":  # torchrun's name for a job without an id
        return None
    return " ".join([job, *arguments])
