"""Cells: which have to run, the ranks of one, and the record that each leaves."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from lab.cluster.settings import Cluster
from lab.distributed.launcher import end_with_parent
from lab.record.run_directory import OUTPUT
from lab.record.schema import Record, Status, read_record
from lab.settings.errors import ConfigError, as_config_error
from lab.settings.overrides import quoted
from lab.settings.secrets import without_secrets
from lab.study.grid import Cell

STOP_S = 40.0  # seconds for a launcher to end its ranks; torchrun itself kills after 30
FAILED: tuple[Status, ...] = ("failed", "oom", "timeout")
EARLIER = "failed-"  # then a number: an earlier attempt that `retry=failed` ran again


def recorded(root: Path, cell: Cell, retries: bool) -> Record | None:
    """Return the record of a cell that need not run again.

    An interrupted cell must, and with `retries` one that failed.

    Raises:
        ConfigError: the cell's directory holds another's record, or a file that is none, which
            must not be lost.
    """
    record = _record(root / cell.name)
    if record and record.cell != cell.name:
        where = root / cell.name / "record.json"
        raise ConfigError(f"{where} is the record of another cell, {record.cell}; move it away")
    again = ("interrupted", *(FAILED if retries else ()))
    return None if record is None or record.status in again else record


def make_directory(root: Path, cell: Cell) -> Path:
    """Make a cell's directory empty, but for its earlier attempts that failed.

    A record of a failure becomes one of these; leftovers of a killed or interrupted attempt are
    deleted, because they are no measurement.
    """
    directory = root / cell.name
    record = _record(directory)
    directory.mkdir(exist_ok=True)
    left = [path for path in directory.iterdir() if not path.name.startswith(EARLIER)]
    if record and record.status in FAILED:
        places = (directory / f"{EARLIER}{number}" for number in itertools.count(1))
        place = next(each for each in places if not each.exists())
        place.mkdir()
        # The record last: if this is killed in between, the cell still counts as failed.
        for path in sorted(left, key=lambda each: each.name == "record.json"):
            path.rename(place / path.name)
        return directory
    for path in left:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return directory


def _record(directory: Path) -> Record | None:
    with as_config_error(), suppress(OSError):
        return read_record(directory / "record.json")
    return None


def run_cells(
    root: Path, cells: Sequence[Cell], turns: int | None, timeout_s: float, lock: int | None = None
) -> list[Record]:
    """Run cells in `root` under one fresh torchrun or horovodrun; return their records.

    Each rank computes on one thread unless OMP_NUM_THREADS is set, at every number of ranks:
    torchrun would give a single rank all cores, which would distort the scaling baseline.

    Args:
        cells: one, or several of one start (lab.study.run).
        turns: steps of a turn; None: the only cell takes none.
        timeout_s: seconds for each cell.
        lock: descriptor of the study's lock, which the launcher holds if this process dies; None:
            on another host, which cannot hold it.
    """
    directories = [make_directory(root, cell) for cell in cells]
    log, one = directories[0] / OUTPUT, cells[0]
    settings = [settings_of(root, cell) for cell in cells]
    train = ["-m", "lab.train", *settings[0]]
    if turns is not None:
        train = ["-m", "lab.training.in_turns", str(turns), json.dumps(settings)]
    command = [*starter(one.world_size, one.over_horovod, one.cluster), *train]
    try:
        status, error = _outcome(command, log, timeout_s * len(cells), lock)
    finally:
        hide_secrets(log)
    for directory in directories[1:]:
        directory.mkdir(exist_ok=True)  # a run that does not begin removes its own
        shutil.copyfile(log, directory / log.name)
    return [
        record_of(directory, cell, status, error)
        for directory, cell in zip(directories, cells, strict=True)
    ]


def _outcome(
    command: list[str], log: Path, timeout_s: float, lock: int | None
) -> tuple[Status, str]:
    """Run a command; return how a run ended that left no record, and why."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={"OMP_NUM_THREADS": "1", **os.environ},
            start_new_session=True,
            pass_fds=[] if lock is None else [lock],
            preexec_fn=end_with_parent,
        )
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            stop(process)
            return "timeout", f"cell_timeout_s={timeout_s:g}: still running"
        except KeyboardInterrupt:
            stop(process)
            raise
    return "failed", last_error(log) or f"exit code {process.returncode}"


def hide_secrets(log: Path) -> None:
    """Hide secrets in what a run has printed: its own code, and libraries, may print any."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    if (shown := without_secrets(text)) != text:
        log.write_text(shown, encoding="utf-8")


def settings_of(root: Path, cell: Cell) -> list[str]:
    """List the settings of `lab.train` that run `cell` in `root`."""
    place = {"runs_dir": str(root.parent), "study": root.name, "cell": cell.name}
    words = [f"{key}={quoted(text)}" for key, text in place.items()]
    return [*cell.arguments, *words, f"repeat={cell.repeat}"]


def starter(world_size: int, over_horovod: bool, cluster: Cluster | None) -> list[str]:
    """Return the command prefix that starts `-m MODULE SETTINGS` as ranks, here or on a cluster."""
    if cluster:
        return [sys.executable, "-m", "lab.cluster", "run", *cluster.settings(), "--"]
    if over_horovod:
        horovodrun = [sys.executable, "-m", "horovod.runner.launch", "--gloo"]
        return [*horovodrun, "-np", str(world_size), sys.executable]
    torchrun = [sys.executable, "-m", "lab.distributed.torchrun"]
    return [*torchrun, f"--nproc-per-node={world_size}"]


def stop(launcher: subprocess.Popen[bytes]) -> None:
    """End a launcher, which ends its ranks."""
    launcher.terminate()
    try:
        launcher.wait(STOP_S)
    except subprocess.TimeoutExpired:
        launcher.kill()
        launcher.wait()


def record_of(directory: Path, cell: Cell, status: Status, error: str) -> Record:
    """Return the record of a cell whose launcher has ended.

    If the run could not record its failure, or was ended from here, write its record.

    Raises:
        ValueError: the run left a file that is not a record.
    """
    path = directory / "record.json"
    record = read_record(path) if path.exists() else _identity(directory, cell)
    if path.exists() and status != "timeout":
        return record
    record.end(status, error)
    record.write(path)
    return record


def _identity(directory: Path, cell: Cell) -> Record:
    """Make the record of a run of which only the settings are known."""
    return Record(
        status="failed",
        study=directory.parent.name,
        cell=cell.name,
        repeat=cell.repeat,
        strategy=cell.strategy,
        variant=cell.variant,
        settings=cell.settings,
        world_size=cell.world_size,
        batch_size=cell.batch_size,
        per_rank_batch_size=cell.batch_size // cell.world_size,
        scaling=cell.config.scaling,
    )


def last_error(log: Path) -> str:
    """Find the line of a run's output that best explains its end."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    reported = [line.partition("lab.train: error: ")[2] for line in lines]
    errors = [line.strip() for line in lines if "error:" in line.lower()]
    return next((line for line in (*reported, *errors, *reversed(lines)) if line), "")
