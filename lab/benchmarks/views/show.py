"""What lab.bench measured, as a table for a terminal and as a figure. Reads its JSON alone."""

from __future__ import annotations

import importlib
import json
import shlex
from pathlib import Path
from types import ModuleType
from typing import Any

import matplotlib

from lab.benchmarks.request import Request
from lab.draw import style
from lab.draw.text import aligned
from lab.record.files import write_json


def present(request: Request, measured: dict[str, Any]) -> bool:
    """Print a result, and write it and its figure to `out=`; whether the values are right."""
    command = shlex.join(["python", "-m", "lab.bench", *request.arguments])
    result = {"bench": request.bench, "command": command, **measured}
    print(table(result))
    if out := request.own["out"]:
        write_json(out, result)
        print(f"wrote {out} and {draw(out)}")
    return not any(row.get("wrong") for row in result["rows"])


def table(result: dict[str, Any]) -> str:
    """What was measured in aligned columns, and how to read them."""
    module = _module_of(result)
    emulated = [f"emulated: {result['emulation']}"] if result["emulation"] != "none" else []
    return "\n".join([*aligned(module.table(result)), "", *module.notes(result), *emulated])


def draw(path: Path) -> Path:
    """Draw the result in the JSON file at `path` into a PNG of the same name; the PNG's path."""
    result = json.loads(path.read_text())
    target = path.with_suffix(".png")
    with matplotlib.rc_context(style.RC):
        figure = _module_of(result).figure(result)
        figure.savefig(target, dpi=150, bbox_inches="tight")
    return target


def _module_of(result: dict[str, Any]) -> ModuleType:
    return importlib.import_module(f"lab.benchmarks.views.{result['bench']}")
