"""Show a result of lab.bench as a table and as a figure, from its JSON alone."""

from __future__ import annotations

import importlib
import json
import pkgutil
import shlex
from pathlib import Path
from types import ModuleType
from typing import Any

from lab.benchmarks.catalogue import BENCHES
from lab.benchmarks.request import Request
from lab.draw.save import save
from lab.draw.text import aligned
from lab.record.files import write_json

VIEWS = {module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)])}


def present(request: Request, measured: dict[str, Any]) -> bool:
    """Print a result, write it and its figure to `out=`, and tell whether the values are right."""
    command = shlex.join(["python", "-m", "lab.bench", *request.arguments])
    result = {"bench": request.bench, "command": command, **measured}
    print(table(result))
    if out := request.own["out"]:
        print(f"wrote {' and '.join(map(str, write(out, result)))}")
    return not any(row.get("wrong") for row in result["rows"])


def is_result(value: object) -> bool:
    """Return whether a value, read from a file, is a result that one of the views shows."""
    return isinstance(value, dict) and value.get("bench") in BENCHES


def table(result: dict[str, Any]) -> str:
    """Align the result in columns, and add how to read them."""
    module = _module_of(result)
    emulated = [f"emulated: {result['emulation']}"] if result["emulation"] != "none" else []
    return "\n".join([*aligned(module.table(result)), "", *module.notes(result), *emulated])


def write(path: Path, result: dict[str, Any]) -> list[Path]:
    """Write the result as JSON, and its figure next to it if this benchmark has one."""
    write_json(path, result)
    picture = path.with_suffix(".png")
    return [path, picture] if draw(json.loads(path.read_text()), picture) else [path]


def draw(result: dict[str, Any], target: Path) -> bool:
    """Draw the result to a file; return whether this benchmark has a figure."""
    module = _module_of(result)
    if hasattr(module, "chart"):
        module.chart(result).write(target.with_suffix(""), [target.suffix.removeprefix(".")])
        return True
    if has_one := hasattr(module, "figure"):
        save(lambda: module.figure(result), target)
    return has_one


def _module_of(result: dict[str, Any]) -> ModuleType:
    name = result["bench"]
    return importlib.import_module(f"lab.benchmarks.{'views.' if name in VIEWS else ''}{name}")
