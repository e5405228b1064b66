"""Run cells as SLURM jobs: submit an array per number of ranks, and poll the queue to the end.

Everything goes through SLURM's own commands and readable files; launch/slurm.sbatch starts the
ranks.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

from lab.record.run_directory import OUTPUT
from lab.record.schema import Record, Status
from lab.settings.config import ConfigError
from lab.study.grid import Cell
from lab.study.launch import hide_secrets, last_error, make_directory, record_of, settings_of

POLL_S = 1.0  # seconds between polls at first; a long sweep polls less often
LONGEST_POLL_S = 15.0
FILES_S = 60.0  # seconds until a network file system shows files that another host wrote
VANISHED = "VANISHED"  # SLURM forgets a job some minutes after its end
# SLURM's states of a job that will not run again, and the status of a cell without a record.
ENDED: dict[str, Status] = {
    "CANCELLED": "interrupted",
    "PREEMPTED": "interrupted",
    "OUT_OF_MEMORY": "oom",
    "TIMEOUT": "timeout",
    "COMPLETED": "failed",
    "FAILED": "failed",
    "NODE_FAIL": "failed",
    "BOOT_FAIL": "failed",
    "DEADLINE": "failed",
    VANISHED: "failed",
}


@dataclass
class ArrayTask:
    """One cell's place in a job array."""

    cell: Cell
    job: str
    number: int
    state: str = "PENDING"
    reason: str = ""  # the reason why it is pending
    running_since: float | None = None
    timed_out: bool = False

    @property
    def name(self) -> str:
        return f"{self.job}_{self.number}"

    def update(self, state: str, reason: str) -> None:
        """Update the state from a line of the queue."""
        self.state, self.reason = state, reason
        if state == "RUNNING" and self.running_since is None:
            self.running_since = time.monotonic()

    def overdue(self, timeout_s: float) -> bool:
        """Tell whether it has run, not waited, for longer than `timeout_s`."""
        if self.running_since is None or self.state != "RUNNING" or self.timed_out:
            return False
        return time.monotonic() - self.running_since > timeout_s


def run_cells(
    root: Path, cells: list[Cell], timeout_s: float
) -> Generator[tuple[Cell, Record], None, None]:
    """Run `cells` in `root` as SLURM finds room; yield each with its record as it ends.

    No job is left in the queue when this generator is closed early or interrupted.

    Raises:
        ConfigError: jobs of a killed sweep of this study are still there, or sbatch refuses.
    """
    if jobs := _jobs_of(root):
        raise ConfigError(
            f"study={root.name}: jobs from an earlier sweep are still queued or running; "
            f"wait until they finish, or run scancel {' '.join(jobs)}"
        )
    folder = root / ".slurm"
    shutil.rmtree(folder, ignore_errors=True)
    tasks: list[ArrayTask] = []
    try:
        for size in sorted({cell.world_size for cell in cells}):
            group = [cell for cell in cells if cell.world_size == size]
            tasks += _submit(root, folder / f"n{size}", group)
        for task in _ended(tasks, timeout_s):
            yield task.cell, _record(root / task.cell.name, task, timeout_s)
    finally:
        _cancel([task for task in tasks if task.state not in ENDED])
        with contextlib.suppress(ConfigError):  # submitted during an interrupt
            _scancel(*_jobs_of(root))
        shutil.rmtree(folder, ignore_errors=True)


def _jobs_of(root: Path) -> list[str]:
    """List the jobs of this study that have not ended."""
    listed = _ask("squeue", "--me", "--noheader", "--format=%F|%k")
    jobs = (line.partition("|") for line in listed)
    return sorted({job for job, _, comment in jobs if comment == _comment(root)})


def _submit(root: Path, folder: Path, cells: list[Cell]) -> list[ArrayTask]:
    """Submit `cells`, all with the same number of ranks. Their jobs read files in `folder`."""
    folder.mkdir(parents=True)
    for number, cell in enumerate(cells, start=1):
        log = make_directory(root, cell) / OUTPUT
        log.touch()
        (folder / f"{number}.log").symlink_to(log)
    listing = folder / "cells"
    listing.write_text(
        "".join(shlex.join(settings_of(root, cell)) + "\n" for cell in cells), encoding="utf-8"
    )
    size = cells[0].world_size
    (answer,) = _ask(
        "sbatch",
        "--parsable",
        "--no-requeue",  # a measurement in two parts is not valid
        "--export=ALL",  # with PYTHON, whatever SBATCH_EXPORT says
        f"--job-name={root.name}",
        f"--comment={_comment(root)}",
        f"--array=1-{len(cells)}",
        f"--ntasks={size}",
        f"--output={str(folder).replace('%', '%%')}/%a.log",
        str(_script()),
        "--cells",
        str(listing),
    )
    job = answer.partition(";")[0]  # the cluster's name may follow
    print(f"SLURM job {job}: world_size={size}, {len(cells)} to run", flush=True)
    return [ArrayTask(cell, job, number) for number, cell in enumerate(cells, start=1)]


def _ended(tasks: list[ArrayTask], timeout_s: float) -> Iterator[ArrayTask]:
    """Yield each task when it has ended; cancel a task that runs for too long."""
    waiting = tasks
    began, shown = time.monotonic(), ""
    while waiting:
        time.sleep(min(POLL_S + (time.monotonic() - began) / 60, LONGEST_POLL_S))
        _look(waiting)
        for task in waiting:
            if task.overdue(timeout_s):
                _scancel(task.name)
                task.timed_out = True
        yield from (task for task in waiting if task.state in ENDED)
        waiting = [task for task in waiting if task.state not in ENDED]
        counts = _counts(waiting)
        if counts and counts != shown:
            print(f"  {counts}", flush=True)
            shown = counts


def _counts(tasks: list[ArrayTask]) -> str:
    """Count the tasks that run and those that wait, by reason."""
    names = [
        f"pending ({task.reason})" if task.state == "PENDING" else task.state.lower()
        for task in tasks
    ]
    return ", ".join(f"{count} {name}" for name, count in sorted(Counter(names).items()))


def _look(tasks: list[ArrayTask]) -> None:
    """Update all states; they stay as they are while SLURM's controller does not answer."""
    try:
        listed = _ask(
            "squeue", "--me", "--array", "--states=all", "--noheader", "--format=%i|%T|%r"
        )
    except ConfigError:
        return
    found = {name: rest for name, _, rest in (line.partition("|") for line in listed)}
    for task in tasks:
        state, _, reason = found.get(task.name, VANISHED).partition("|")
        task.update(state, reason)


def _record(directory: Path, task: ArrayTask, timeout_s: float) -> Record:
    """Return the record of a task that has ended; make one if it left none."""
    deadline = time.monotonic() + FILES_S
    while task.state == "COMPLETED" and not (directory / "record.json").exists():
        if time.monotonic() > deadline:
            break
        time.sleep(POLL_S)
    hide_secrets(directory / OUTPUT)
    if task.timed_out:
        error = f"cell_timeout_s={timeout_s:g}: still running"
        return record_of(directory, task.cell, "timeout", error)
    said = last_error(directory / OUTPUT)
    if task.state != "FAILED" or not said:
        said = f"SLURM reports {task.state}; {said}".removesuffix("; ")
    return record_of(directory, task.cell, ENDED[task.state], said)


def _cancel(tasks: list[ArrayTask]) -> None:
    """Cancel the tasks that have not ended, and wait: SLURM kills those that do not stop."""
    jobs = sorted({task.job for task in tasks})
    if not jobs:
        return
    print(f"\ncancelling SLURM job{'s' if len(jobs) > 1 else ''} {' '.join(jobs)}", file=sys.stderr)
    _scancel(*jobs)
    while any(task.state not in ENDED for task in tasks):
        time.sleep(POLL_S)
        _look(tasks)


def _scancel(*names: str) -> None:
    if not names:
        return
    with contextlib.suppress(ConfigError):  # it has just ended by itself
        _ask("scancel", *names)


def _ask(*command: str) -> list[str]:
    """Run one of SLURM's commands and return its lines, or raise ConfigError with its message."""
    environment = {**os.environ, "PYTHON": sys.executable}  # the jobs' interpreter is this one
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.splitlines() or [f"{command[0]}: exit code {done.returncode}"]
        raise ConfigError(f"launcher=slurm: {said[-1]}")
    return done.stdout.splitlines()


def _comment(root: Path) -> str:
    """Return the comment by which a sweep finds its jobs again."""
    return f"lab.sweep {root}"


def _script() -> Path:
    """Return the batch script: inside the package if installed, next to it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "slurm.sbatch"
    return inside if inside.is_file() else package.parent / "launch" / "slurm.sbatch"
