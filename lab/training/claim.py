"""One run directory for all ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from lab.distributed.world import World
from lab.record.run_directory import RunDirectory
from lab.settings.errors import ConfigError


def claim_together(world: World, claim: Callable[[], RunDirectory]) -> tuple[RunDirectory, bool]:
    """Claim a directory on rank 0, and tell the others its path, or why there is none.

    Args:
        claim: called on rank 0 alone, whose directory holds the lock.

    Returns:
        the directory, and whether its run is done.

    Raises:
        ConfigError: on all ranks, if `claim` raises ValueError.
    """
    answer, claimed = "", None
    if world.rank == 0:
        try:
            claimed = claim()
            answer = f"{'done' if claimed.status() == 'done' else 'at'} {claimed.path}"
        except ValueError as error:
            answer = f"no {error}"
    verdict, _, text = world.broadcast_text(answer).partition(" ")
    if verdict == "no":
        raise ConfigError(text)
    return claimed or RunDirectory(Path(text)), verdict == "done"
