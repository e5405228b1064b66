"""A run's parts without a run, to measure them or to find wrong settings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from omegaconf import DictConfig

from lab.certificate.check import Check
from lab.distributed import world as worlds
from lab.distributed.watchdog import Watchdog
from lab.distributed.world import World
from lab.training.assemble import Assembly, assemble, join

NEVER_S = 1e9  # no exchange is watched here: the process group's timeout ends a hang


@contextmanager
def assembled(config: DictConfig, world: World) -> Iterator[Assembly]:
    """Build everything that trains, and release it when the context ends."""
    watch = Watchdog(world, NEVER_S, lambda _: None)
    parts = assemble(config, world, watch)
    parts.trainer.check = Check()  # a certificate is of a run, and its cost of no measurement
    yield parts
    watch.close()
    parts.worker.close()


def check(config: DictConfig) -> None:
    """Build everything that trains, and release it.

    Raises:
        ConfigError: a setting does not fit the data, devices or files.
    """
    world = join(config)
    try:
        with assembled(config, world):
            pass
    finally:
        worlds.stop()
