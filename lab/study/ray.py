"""Run cells as tasks of a Ray cluster, which places each on a node with the CPUs and GPUs it needs.

A task is what a local sweep does for one cell: a fresh torchrun, and the record that it leaves. So
every node needs the lab, and the study's and the current folder under the same paths.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path

import ray
from ray import exceptions

from lab.draw.text import number_of
from lab.record.schema import Record
from lab.settings.config import ConfigError
from lab.settings.errors import one_line
from lab.study import launch
from lab.study.grid import Cell

MOST_STARTS = 3  # of a cell whose nodes are lost: it may be what they die of
CANCEL_S = launch.STOP_S + 20.0  # for cells to end after Ctrl-C


def run_cells(
    root: Path, cells: list[Cell], timeout_s: float
) -> Generator[tuple[Cell, Record], None, None]:
    """Run `cells` in `root` as Ray finds room; yield each with its record as it ends.

    A cell whose node is lost before it is done starts anew on another. No cell runs on when this
    generator is closed early or interrupted.

    Raises:
        ConfigError: no Ray runs here, no node of it is large enough for a cell, or one lacks the
            lab or the study's folder.
    """
    if not cells:
        return
    with _connected():
        asked = {cell.name: _asked(cell) for cell in cells}
        _check_room(cells, asked)
        starts, variables = Counter[str](), _variables()

        def start(cell: Cell) -> ray.ObjectRef[Record]:
            starts[cell.name] += 1
            cpus, gpus = asked[cell.name]
            # Ray's own retries would not look whether the cell is done.
            task = ray.remote(_run).options(num_cpus=cpus, num_gpus=gpus, max_retries=0)
            return task.remote(root, cell, timeout_s, Path.cwd(), variables)

        running = {start(cell): cell for cell in cells}
        try:
            while running:
                (ended,), _ = ray.wait([*running], num_returns=1)
                cell = running.pop(ended)
                record = _record(root, cell, ended)
                if record is None and starts[cell.name] < MOST_STARTS:
                    print(
                        f"  {cell.name}: its Ray node was lost; the cell starts again", flush=True
                    )
                    running[start(cell)] = cell
                    continue
                yield cell, record or _of_lost(root, cell)
        finally:
            for task in running:
                ray.cancel(task)  # as Ctrl-C in the task
            ray.wait([*running], num_returns=len(running), timeout=CANCEL_S) if running else None


def _run(
    root: Path, cell: Cell, timeout_s: float, folder: Path, variables: dict[str, str]
) -> Record:
    """Run a cell on this task's node, in the sweep's folder, with these variables of its own."""
    os.chdir(folder)
    os.environ.update(variables)
    (record,) = launch.run_cells(root, [cell], None, timeout_s)
    return record


@contextlib.contextmanager
def _connected() -> Iterator[None]:
    """Connect to the cluster that RAY_ADDRESS names, or that this machine belongs to."""
    if ray.is_initialized():  # by a notebook, which goes on with it
        yield
        return
    try:
        ray.init("auto", log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError) as error:
        reason = one_line(error)
        raise ConfigError(f"launcher=ray: {reason}; start Ray with ray start --head") from None
    try:
        yield
    finally:
        ray.shutdown()


def _variables() -> dict[str, str]:
    """Return the variables that a cell needs: secrets in settings, and the threads of a rank.

    Ray would set OMP_NUM_THREADS to the CPUs of all ranks of a cell, for each of them.
    """
    own = {name: text for name, text in os.environ.items() if name.startswith("LAB_")}
    return own | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}


def _asked(cell: Cell) -> tuple[int, int]:
    """Return the CPUs and GPUs that a cell needs on one node."""
    config, threads = cell.config, os.environ.get("OMP_NUM_THREADS", "1")
    cpus = cell.world_size * (config.threads or (int(threads) if threads.isdecimal() else 1))
    may_use = config.device == "auto" and ray.cluster_resources().get("GPU", 0)
    if config.device != "cuda" and not may_use:
        return cpus, 0
    return cpus, 1 if config.share_gpus else cell.world_size


def _check_room(cells: list[Cell], asked: dict[str, tuple[int, int]]) -> None:
    """Refuse cells for which Ray would wait forever, and say which room there is."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    rooms = [(int(node.get("CPU", 0)), int(node.get("GPU", 0))) for node in nodes]
    for cell in cells:
        cpus, gpus = asked[cell.name]
        if not any(room[0] >= cpus and room[1] >= gpus for room in rooms):
            raise ConfigError(
                f"world_size={cell.world_size}: launcher=ray runs a cell on one node, which needs "
                f"{cpus} CPUs and {gpus} GPUs; the nodes have (CPUs, GPUs) {sorted(rooms)}"
            )
    print(
        f"Ray: {number_of(len(cells), 'cell')} to run; the nodes have (CPUs, GPUs) {sorted(rooms)}",
        flush=True,
    )


def _record(root: Path, cell: Cell, task: ray.ObjectRef[Record]) -> Record | None:
    """Return the record of a cell whose task has ended; None: its node or process was lost."""
    try:
        return ray.get(task)
    except exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, ConfigError):
            raise cause from None
        raise ConfigError(f"launcher=ray: cell={cell.name}: {one_line(cause)}") from None
    except exceptions.OutOfMemoryError as error:
        return launch.record_of(root / cell.name, cell, "oom", one_line(error))
    except exceptions.RayError:
        return launch.recorded(root, cell, retries=True)  # it may have ended just before


def _of_lost(root: Path, cell: Cell) -> Record:
    directory = launch.make_directory(root, cell)
    error = f"its Ray node or process was lost {MOST_STARTS} times"
    return launch.record_of(directory, cell, "failed", error)
