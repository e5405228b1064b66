"""Measure items within a budget, and keep what is known in a JSON that a later start continues.

torch is imported only to measure.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lab.gpu_report.items import BoundedFigure, Item, Result
from lab.settings.errors import ConfigError, one_line
from lab.settings.storage import write_json

KIND = "gpu_report"
DONE, ABSENT, FAILED, SKIPPED = "done", "not available", "failed", "skipped"
ORDER = (SKIPPED, DONE, ABSENT, FAILED)  # of measuring again: one that failed may end the process
KEPT = 4000  # characters of a traceback's end
HANGS, HANGS_S = 3, 60  # an item hangs that takes so many times what is estimated, and seconds
Report = dict[str, Any]


def begun(path: Path, command: str, pretended: bool) -> Report:
    """Return the report in `path` with what it has already, or a new one.

    Raises:
        ConfigError: it is another machine's, or no report; or torch can use no GPU here, and no CPU
            pretends to be one.
    """
    from lab.distributed.world import check_gpus
    from lab.measure.environment import environment, git_commit

    try:
        check_gpus("cpu" if pretended else "cuda", 1)
    except ValueError as error:
        why = str(error).partition(": ")[2].partition(";")[0]
        raise ConfigError(f"{why}; pretend=true tries the report on a CPU") from None
    about = environment(1)
    new: Report = {
        "kind": KIND,
        "pretended": pretended,
        "commands": [command],
        "environment": about,
        "git_commit": git_commit(),
        "items": {},
    }
    if not path.exists():
        return new
    old = opened("out", path)
    for key, mine, its in (
        ("pretended", pretended, old["pretended"]),
        ("gpus", about["gpus"], old["environment"]["gpus"]),
    ):
        if mine != its:
            raise ConfigError(
                f"out={path}: the existing file has {key}={its}, but this run has {key}={mine}; "
                "choose another file"
            )
    commands = list(dict.fromkeys([*old["commands"], command]))
    return {**new, "commands": commands, "items": old["items"]}


def opened(key: str, path: Path) -> Report:
    """Return the report that a file holds, which the setting `key` names.

    Raises:
        ConfigError: it holds none.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}={path}: cannot be read: {one_line(error)}") from None
    if not isinstance(found, dict) or found.get("kind") != KIND:
        raise ConfigError(f"{key}={path}: not a report of lab.gpu_report")
    return found


def left(items: Sequence[Item], report: Report, again: bool) -> list[Item]:
    """Return the items to measure: new ones first, then those that did not end well."""
    status = {key: entry["status"] for key, entry in report["items"].items()}
    todo = [item for item in items if again or status.get(item.key) != DONE]
    return sorted(todo, key=lambda item: ORDER.index(status.get(item.key, SKIPPED)))


def measure(
    items: Sequence[Item],
    report: Report,
    path: Path,
    budget_s: float,
    take: Callable[[Item, bool], Result],
) -> bool:
    """Measure items while the budget lasts, print how, and write the report after each.

    Args:
        take: lab.gpu_report.measuring.measure.

    Returns:
        Whether the device is still there: after some errors a process can use a GPU no more.
    """
    ends_at = time.monotonic() + budget_s
    for number, item in enumerate(items, start=1):
        remaining_s = ends_at - (began := time.monotonic())
        what = f"[{number}/{len(items)}] {item.key}: {item.about}"
        print(f"{what}; {remaining_s:.0f} s left", flush=True)
        before = report["items"].get(item.key)
        if item.seconds > remaining_s:
            left = f"{remaining_s:.0f} of {budget_s:g} s were left"
            line = f"takes about {item.seconds:g} s, but only {left}"
            entry = before or {"status": SKIPPED, "line": line}
        else:
            # Stands there if the process ends meanwhile.
            report["items"][item.key] = _failed("the process ended during this item")
            write_json(path, report)
            if not report["pretended"]:  # a launch or a collective that hangs ends by nothing else
                faulthandler.dump_traceback_later(HANGS * item.seconds + HANGS_S, exit=True)
            entry = _entry(item, report["pretended"], take)
            faulthandler.cancel_dump_traceback_later()
            entry["seconds"] = time.monotonic() - began
        commit = report["git_commit"]["commit"]
        report["items"][item.key] = {"about": item.about, "commit": commit, **entry}
        write_json(path, report)
        for text in said(report["items"][item.key], report["pretended"]):
            print(f"    {text}", flush=True)
        if entry["status"] == FAILED and not _is_alive():
            return False
    return True


def _entry(item: Item, pretended: bool, take: Callable[[Item, bool], Result]) -> dict[str, Any]:
    import torch

    try:
        result = json.loads(json.dumps(take(item, pretended)))  # as a later start will read it
        figures = [asdict(figure) for figure in item.figures(result)]
        return {"status": DONE, "result": result, "figures": figures, "draws": item.draws}
    except ConfigError as error:
        return {"status": ABSENT, "line": str(error)}
    except Exception as error:
        text = f"{type(error).__name__}: {one_line(error)}"
        return _failed(text) | {"traceback": traceback.format_exc()[-KEPT:]}
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def _failed(line: str) -> dict[str, Any]:
    return {"status": FAILED, "line": line}


def _is_alive() -> bool:
    """Tell whether the GPU, if there is one, still computes for this process."""
    import torch

    try:
        if torch.cuda.is_initialized():
            torch.rand(1, device="cuda")  # after a graph that failed, it may draw no numbers
            torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def said(entry: dict[str, Any], pretended: bool) -> list[str]:
    """Say how an item ended: its figures beside their bounds, or why there are none."""
    if entry["status"] != DONE:
        return [f"{entry['status']}: {entry['line']}"]
    figures = [BoundedFigure(**figure) for figure in entry["figures"]]
    bounds = [f"({each.bound}: {each.verdict})" if each.bound else "" for each in figures]
    values = [f"{each.name}: {written(each, pretended)}" for each in figures]
    lines = [f"{value}  {bound}" for value, bound in zip(values, bounds, strict=True)]
    return [*map(str.rstrip, lines), f"done in {entry['seconds']:.1f} s"]


def written(figure: BoundedFigure, pretended: bool) -> str:
    """Write a figure's number with its unit."""
    number = "-" if figure.value is None else f"{figure.value:.4g} {figure.unit}".rstrip()
    return f"{number} (pretended)" if pretended else number
