"""Run items, in time and without leaving a process, and compare figures with their ranges."""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lab.checklist.figures import Results
from lab.checklist.item import Command, Figure, Item, Machine, place
from lab.record.files import write_json
from lab.settings.errors import ConfigError

Run = Callable[[Command, Results, float], dict[str, Any]]
MARK = "LAB_FIRST_HOUR"  # marks our processes: ranks have sessions of their own
STOP_S = 45.0  # torchrun kills its ranks 30 s after it is asked to end
POLL_S = 1.0
QUERY = ("nvidia-smi", "--query-compute-apps=gpu_uuid,pid", "--format=csv,noheader")
LEAST_S = 60.0  # seconds that a command has, however long earlier commands took
# Worst last: an item has the verdict of its worst figure.
VERDICTS = ("not applicable", "noted", "holds", "differs", "failed")


def chosen(items: list[Item], keys: list[str] | None) -> list[Item]:
    """Select items by number ("4") or part ("4a"); None: all.

    Raises:
        ConfigError: there is no such item.
    """
    names = {item.key: {item.key, str(place(item.key)[0])} for item in items}
    for key in keys or ():
        if not any(key in each for each in names.values()):
            raise ConfigError(f"items={key}: allowed are {', '.join(names)}, or their numbers")
    return [item for item in items if keys is None or names[item.key] & set(keys)]


def check(
    item: Item, machine: Machine, results: Results, limit_s: float, run: Run
) -> dict[str, Any]:
    """Run an item, and return its verdict, figures and commands, for JSON.

    Args:
        limit_s: seconds that all its commands may take together.
        run: as `run` below.
    """
    about = {"key": item.key, "title": item.title}
    if machine.num_gpus < item.num_gpus:
        why = f"needs {item.num_gpus} GPUs"
        return {**about, "verdict": VERDICTS[0], "problems": [why], "figures": [], "commands": []}
    deadline = time.monotonic() + limit_s
    commands, problems = [], list[str]()
    for command in item.commands:
        found = run(command, results, max(LEAST_S, deadline - time.monotonic()))
        commands.append({"command": shlex.join(["python", *argv(command)[1:]]), **found})
        if found["code"] is None:
            problems.append(f"{command.name}: ended at time_limit_s={limit_s:g}")
        elif found["code"] != command.code:
            said = f"exit code {found['code']}, not {command.code}"
            problems.append(f"{command.name}: {said}; see {command.name}.out")
    figures = [judge(figure, results) for figure in item.figures]
    verdicts = [each["verdict"] for each in figures] + ["failed" for _ in problems]
    worst = max(verdicts, key=VERDICTS.index, default="noted")
    found = {"problems": problems, "figures": figures, "commands": commands}
    return {**about, "verdict": worst, **found}


def judge(figure: Figure, results: Results) -> dict[str, Any]:
    """Compare a figure with its expected range; "failed" if it cannot be read."""
    facts = {"name": figure.name, "unit": figure.unit, "expected": figure.expected()}
    facts |= {"why": figure.why}
    try:
        value = figure.reader()(results)
    except (OSError, LookupError, ValueError, TypeError, ArithmeticError) as error:
        problem = f"cannot be read: {type(error).__name__}: {error}"
        return {**facts, "value": None, "verdict": "failed", "why": problem}
    if math.isnan(value) or (ends := figure.range()) is None:
        return {**facts, "value": value, "verdict": "noted"}
    holds = ends[0] <= value <= ends[1]
    return {**facts, "value": value, "verdict": "holds" if holds else "differs"}


def run(command: Command, results: Results, limit_s: float) -> dict[str, Any]:
    """Run a command in the current directory; return its end, also written to NAME.ended.json.

    Returns:
        code (None if it took longer than `limit_s`), seconds, num_left (processes that it left,
            which are ended), and from nvidia-smi, if requested: most_processes, on_one_gpu.
    """
    # Files of an earlier run could be mistaken for this one's.
    for ending in ("out", "json", "yaml", "png", "ended.json"):
        (results.folder / f"{command.name}.{ending}").unlink(missing_ok=True)
    shutil.rmtree(results.run(command.name), ignore_errors=True)
    marked = f"{os.getpid()}-{command.name}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **command.environment, MARK: marked}
    if command.one_gpu:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or "0"
        environment["CUDA_VISIBLE_DEVICES"] = visible.split(",")[0]
    most = {"most_processes": 0, "on_one_gpu": 0}
    began = time.monotonic()
    with (results.folder / f"{command.name}.out").open("wb") as output:
        process = subprocess.Popen(
            argv(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            code = _wait(process, command, marked, began, limit_s, most)
        finally:
            left = _end(process, marked)
    found = {"code": code, "seconds": time.monotonic() - began, "num_left": left, **most}
    write_json(results.folder / f"{command.name}.ended.json", found)
    return found


def argv(command: Command) -> list[str]:
    """Compose the command line; torchrun is run as a module, without an installed script."""
    torchrun = ["-m", "lab.distributed.torchrun"]
    ranks = [*torchrun, f"--nproc-per-node={command.num_ranks}"] if command.num_ranks else []
    return [sys.executable, *ranks, *command.words]


def _wait(
    process: subprocess.Popen[bytes],
    command: Command,
    marked: str,
    began: float,
    limit_s: float,
    most: dict[str, int],
) -> int | None:
    stop_at = began + (command.stop_rank_after_s or limit_s)
    while time.monotonic() < began + limit_s:
        try:
            return process.wait(POLL_S)
        except subprocess.TimeoutExpired:
            if command.counts_processes:
                _count_processes(most)
        if time.monotonic() > stop_at:
            stop_at = began + limit_s
            _signal(_marked(marked, "RANK=1"), signal.SIGSTOP)
    return None


def _end(process: subprocess.Popen[bytes], marked: str) -> int:
    """End the remaining processes, gently first; return how many had to be killed."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    left = _marked(marked)
    _signal(left, signal.SIGKILL)
    return len(left)


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself
            os.kill(pid, number)


def _marked(marked: str, *variables: str) -> list[int]:
    """List processes with our mark and these variables in their environment."""
    wanted = {f"{MARK}={marked}".encode(), *(each.encode() for each in variables)}
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if wanted <= set((path / "environ").read_bytes().split(b"\0")):
                found.append(int(path.name))
        except OSError:  # the process has ended, or is another user's
            continue
    return found


def _count_processes(most: dict[str, int]) -> None:
    """Record the most processes that nvidia-smi has seen; in a container it may see none."""
    try:
        done = subprocess.run(QUERY, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return
    gpus = [line.split(",")[0] for line in done.stdout.splitlines() if "," in line]
    counts = [gpus.count(gpu) for gpu in set(gpus)]
    most["most_processes"] = max(most["most_processes"], len(gpus))
    most["on_one_gpu"] = max(most["on_one_gpu"], *counts, 0)
