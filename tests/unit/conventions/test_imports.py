"""Imports point downwards, and optional libraries are imported in one place."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

LAB = Path(__file__).resolve().parents[3] / "lab"

ROW = re.compile(r"^\| (\d+) \| `(\w+)` \| .* \| ([\w, ]*) ?\|$", re.MULTILINE)
PACKAGES = {
    package: (int(layer), set(filter(None, imported.strip().split(", "))))
    for layer, package, imported in ROW.findall((LAB.parent / "docs/design.md").read_text())
}
ONLY_IN = {
    "altair": {"lab/draw/chart.py"},  # at its first use: machines that only measure lack it
    "triton": {
        f"lab/codec/gpu_{name}.py" for name in ("kernels", "topk_kernels", "randomk", "low_rank")
    },
    "wandb": {"lab/record/recorders.py"},
    "hydra": {
        *("lab/settings/composition.py", "lab/settings/config.py", "lab/settings/overrides.py")
    },
    "horovod": {"lab/distributed/horovod_comm.py"},
}
COMMANDS = sorted(path.stem for path in LAB.glob("*.py") if path.stem != "__init__")
LONGEST_COMMAND = 80  # lines


@cache
def imports(path: Path) -> set[str]:
    """Collect the modules that a file imports, at any depth of its code."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_every_package_is_in_the_documented_table() -> None:
    folders = {path.parent for path in LAB.glob("*/__init__.py")}
    assert {each.name for each in folders if not each.is_symlink()} == set(PACKAGES)  # lab/conf is


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_what_the_table_says_and_only_downwards(package: str) -> None:
    layer, documented = PACKAGES[package]
    imported = {
        module.split(".")[1]: str(path.relative_to(LAB))
        for path in (LAB / package).rglob("*.py")
        for module in imports(path)
        if module.startswith("lab.") and module.split(".")[1] != package
    }
    assert set(imported) == documented, imported
    upwards = {name: place for name, place in imported.items() if PACKAGES[name][0] >= layer}
    assert not upwards, upwards


@pytest.mark.parametrize("command", COMMANDS)
def test_a_file_directly_in_lab_is_a_command(command: str) -> None:
    """It is a short command that nothing imports."""
    text = (LAB / f"{command}.py").read_text()
    assert text.count("\n") <= LONGEST_COMMAND
    assert "def main(" in text and 'if __name__ == "__main__":' in text
    importers = [path.name for path in LAB.rglob("*.py") if f"lab.{command}" in imports(path)]
    assert importers == []


@pytest.mark.parametrize("library", ONLY_IN)
def test_optional_and_central_libraries_have_one_place(library: str) -> None:
    places = {
        str(path.relative_to(LAB.parent))
        for path in LAB.rglob("*.py")
        if any(module.split(".")[0] == library for module in imports(path))
    }
    assert places == ONLY_IN[library]


def test_help_and_settings_need_no_torch() -> None:
    light = ("settings.config", "settings.command", "study.grid")
    light += ("cluster.__main__", "gpu_report.__main__")
    modules = [f"lab.{name}" for name in (*light, *COMMANDS)]
    each = "print(name) if importlib.import_module(name) and 'torch' in sys.modules else None"
    check = f"import importlib, sys\nfor name in {modules}: {each}"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr  # or the first with torch, and on


def test_a_machine_that_only_measures_needs_nothing_that_draws() -> None:
    program = """
import importlib, pkgutil, sys
sys.modules.update(dict.fromkeys(("altair", "vl_convert", "PIL")))  # None: cannot be imported
for package in ("benchmarks", "device", "gpu_report"):
    for module in pkgutil.iter_modules([f"lab/{package}"]):
        if module.name != "__main__":
            importlib.import_module(f"lab.{package}.{module.name}")
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=LAB.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
