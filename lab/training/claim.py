"""The directory of a run, which rank 0 claims for all."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig

from lab.distributed import launcher
from lab.distributed.world import World
from lab.record.run_directory import RunDirectory
from lab.settings.config import ConfigError
from lab.settings.names import run_name
from lab.settings.secrets import kept_words
from lab.settings.sources import fingerprint


def claim_directory(config: DictConfig, arguments: list[str], world: World) -> RunDirectory | None:
    """Claim the run's directory on rank 0, and tell the others its path, or why there is none.

    Returns: None if an earlier start of this job has already finished.

    Raises: ConfigError: it is taken, or cannot be written.
    """
    answer, claimed = "", None
    if world.rank == 0:
        parent = Path(config.runs_dir).absolute() / config.study
        name = run_name(arguments, config.strategy, world.size, fingerprint(config.code))
        try:
            claimed = RunDirectory.claim(
                parent, config.cell, name, config.resume, launcher.launch_id(kept_words(arguments))
            )
            answer = f"{'done' if claimed.status() == 'done' else 'at'} {claimed.path}"
        except ValueError as error:
            answer = f"no {error}"
    verdict, _, text = world.broadcast_text(answer).partition(" ")
    if verdict == "no":
        raise ConfigError(text)
    if verdict == "done":
        if claimed:
            claimed.release()
            print(f"done already, by an earlier start of this job: {text}")
        return None
    return claimed or RunDirectory(Path(text))  # rank 0's holds the lock
