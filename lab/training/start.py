"""Join the ranks that were started together, and run."""

from __future__ import annotations

from omegaconf import DictConfig

from lab.distributed import world
from lab.training.assemble import join
from lab.training.run import Run, claim_directory


def start(config: DictConfig, arguments: list[str]) -> int:
    """Be one rank of a run; the process's exit code.

    Args:
        config: composed of `arguments`, which name the run.

    Raises:
        ConfigError: a setting that proves wrong with data, devices and files at hand.
    """
    ranks = join(config)
    try:
        directory = claim_directory(config, arguments, ranks)
        return Run(config, arguments, ranks, directory).execute() if directory else 0
    finally:
        world.stop()
