"""`lab.run`: train with settings that a program of the user's own has composed by Hydra."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, cast

from lab.cluster.settings import adopt_ranks, cluster_of, num_launched
from lab.distributed import launcher
from lab.record.schema import Record, read_record
from lab.settings.errors import ConfigError

if TYPE_CHECKING:
    from omegaconf import DictConfig


def run(config: DictConfig, world_size: int = 1) -> Record:
    """Train as `python -m lab.train` does, with settings composed by Hydra from `pkg://lab.conf`.

    Each call trains in new processes, so a program can start many runs, one after another or at the
    same time, as Hydra's sweepers and launchers do. If a launcher such as torchrun started your
    program, the run trains in that launcher's processes.

    Args:
        config: the settings of the run, without any settings of your own program.
        world_size: the number of ranks to start. Under a launcher, the launcher sets it.

    Returns:
        The run's record. Its `final` contains the metrics of the last evaluation, such as "loss".

    Raises:
        ConfigError: a setting is wrong. Nothing was started.
        RuntimeError: the run failed or was stopped. The message names its folder and the error.
    """
    from omegaconf import DictConfig

    from lab.settings.composition import of_program  # imports Hydra

    if not isinstance(cast(object, config), DictConfig):
        raise ConfigError(
            f"config: has type {type(config).__name__}; must be the DictConfig that Hydra composed"
        )
    adopt_ranks()
    was_launched = launcher.was_launched()
    checked, words = of_program(config, num_launched() if was_launched else world_size)
    path = _joined(checked, words) if was_launched else _started(checked, words, world_size)
    record = read_record(path / "record.json")
    if record.status != "done":
        raise RuntimeError(f"{path}: {record.status}: {record.error}")
    return record


def _joined(config: DictConfig, words: list[str]) -> Path:
    """Be a rank of a run; return the run's folder."""
    from lab.training.run import start

    paths = list[Path]()
    start(config, words, paths.append)
    if not paths:
        raise RuntimeError("an earlier start of this job has finished this run")
    return paths[0]


def _started(config: DictConfig, words: list[str], world_size: int) -> Path:
    """Start ranks; return their run's folder, in which they have left a record."""
    from omegaconf import OmegaConf

    from lab.study.launch import end_with_parent, starter, stop

    over_horovod = "horovod" in config.comm["_target_"]
    with tempfile.TemporaryDirectory() as folder:  # which nobody else may read
        handed, told = Path(folder, "settings.json"), Path(folder, "path")
        content = {"config": OmegaConf.to_container(config), "words": words, "told": str(told)}
        handed.write_text(json.dumps(content), encoding="utf-8")
        ranks = starter(world_size, over_horovod, cluster_of(config, world_size))
        command = [*ranks, "-m", "lab.loop.configured", str(handed)]
        environment = {"OMP_NUM_THREADS": "1", **os.environ}  # as of a cell of a sweep
        process = subprocess.Popen(command, env=environment, preexec_fn=end_with_parent)
        try:
            code = process.wait()
        except BaseException:
            stop(process)
            raise
        path = Path(told.read_text(encoding="utf-8")) if told.exists() else None
    if path is None or not (path / "record.json").exists():
        raise RuntimeError(f"the run did not begin (exit code {code}); its output gives the reason")
    return path


def main(arguments: list[str]) -> int:
    """Be one rank of a run whose settings stand in a file."""
    from omegaconf import OmegaConf

    from lab.settings.command import report_error
    from lab.training.run import start

    handed = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))

    def begun(path: Path) -> None:
        if launcher.is_first_rank():
            Path(handed["told"]).write_text(str(path), encoding="utf-8")

    try:
        config = OmegaConf.create(dict(handed["config"]))
        return start(config, handed["words"], begun)
    except ConfigError as error:
        launcher.let_first_rank_report()
        report_error("lab.run", error)
        return 2


if __name__ == "__main__":
    launcher.run_as_process(main)
