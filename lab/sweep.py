"""Run a grid of cells: `python -m lab.sweep study=demo`."""

from __future__ import annotations

import sys

from lab.settings.command import Command, CommandLine, answers
from lab.study.grid import SweepSettings
from lab.study.run import sweep

COMMAND = Command(
    "lab.sweep",
    "Run a grid of settings. Any setting of lab.train accepts a list, as in batch_size=128,256.",
    (
        "python -m lab.sweep study=demo",
        "python -m lab.sweep study=mine strategy=none,overlap,onebit world_size=1,2 "
        "batch_size=128,256 repeats=3",
        "python -m lab.sweep study=buckets strategy=overlap world_size=2 bucket_mb=1,4,25 steps=60",
        "SBATCH_GPUS_PER_TASK=1 python -m lab.sweep launcher=slurm study=demo world_size=1,2,4,8",
    ),
    SweepSettings,
    runs=True,
    sweeps=True,
)


@answers(COMMAND)
def main(line: CommandLine) -> int:
    """Run the missing cells of a study; the exit code is 1 if none of its cells is done."""
    from lab.web.live import served  # after wrong settings: Python's HTTP server is slow to import

    return sweep(line, served)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
