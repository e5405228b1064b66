"""Run items, and compare their figures with the expected ranges."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Callable
from typing import Any

from lab.checklist.figures import Results
from lab.checklist.item import Command, Figure, Item, place
from lab.checklist.machine import Machine
from lab.checklist.process import argv
from lab.settings.config import ConfigError

Run = Callable[[Command, Results, float], dict[str, Any]]
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
        run: see lab.checklist.process.run.
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
        if problem := _problem(command, found, limit_s):
            problems.append(problem)
    figures = [judge(figure, results) for figure in item.figures]
    verdicts = [each["verdict"] for each in figures] + ["failed" for _ in problems]
    worst = max(verdicts, key=VERDICTS.index, default="noted")
    return {
        **about,
        "verdict": worst,
        "problems": problems,
        "figures": figures,
        "commands": commands,
    }


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


def _problem(command: Command, found: dict[str, Any], limit_s: float) -> str | None:
    if found["code"] is None:
        return f"{command.name}: ended at time_limit_s={limit_s:g}"
    if found["code"] != command.code:
        return (
            f"{command.name}: exit code {found['code']}, not {command.code}; see {command.name}.out"
        )
    return None
