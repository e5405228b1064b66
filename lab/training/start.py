"""Join the ranks that were started together, and run."""

from __future__ import annotations

from omegaconf import DictConfig

from lab.distributed import world
from lab.training.assemble import join
from lab.training.claim import claim_directory
from lab.training.run import Run


def start(config: DictConfig, arguments: list[str]) -> int:
    """Run one rank of a run; return the process's exit code.

    Args:
        config: composed from `arguments`, which name the run.

    Raises:
        ConfigError: a setting does not fit the data, devices or files.
    """
    ranks = join(config)
    try:
        directory = claim_directory(config, arguments, ranks)
        return Run(config, arguments, ranks, directory).execute() if directory else 0
    finally:
        world.stop()
