"""Imports point one way, and what not everyone has is imported in one place."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

LAB = Path(__file__).resolve().parents[2] / "lab"

# A room may import those after it in its own line, and itself.
MAY_IMPORT = {
    "codec": set(),
    "measure": set(),
    "model": {"measure"},
    "data": set(),
    "distributed": set(),
    "transform": {"model"},
    "exchange": {"distributed", "codec", "measure"},
    "record": {"measure"},
    "analysis": {"measure", "record"},
    "simulate": {"config", "exchange", "measure", "analysis"},
    "checklist": {"distributed", "config", "record", "measure", "analysis"},
    "cluster": {"config", "cli", "distributed", "measure"},
}
ONLY_IN = {
    "triton": {"lab/codec/gpu.py", "lab/codec/gpu_kernels.py"},
    "wandb": {"lab/record/wandb.py"},
    "hydra": {"lab/config.py"},
    "horovod": {"lab/distributed/horovod_comm.py"},
}
COMMANDS = (
    *("train", "sweep", "plot", "bench", "predict", "verify", "explain", "profile_layers"),
    *("first_hour", "cluster.__main__"),
)


def imports(path: Path) -> set[str]:
    """Modules that the file at `path` imports, at any depth of its code."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_rooms_import_only_what_lies_below_them(room: str) -> None:
    allowed = {f"lab.{name}" for name in MAY_IMPORT[room] | {room}}
    for path in (LAB / room).glob("*.py"):
        for module in imports(path):
            if module.startswith("lab."):
                assert ".".join(module.split(".")[:2]) in allowed, f"{path.name} imports {module}"


def test_nothing_imports_the_commands() -> None:
    for path in LAB.rglob("*.py"):
        assert not imports(path) & {f"lab.{command}" for command in COMMANDS}, path


@pytest.mark.parametrize("library", ONLY_IN)
def test_optional_and_central_libraries_have_one_place(library: str) -> None:
    places = {
        str(path.relative_to(LAB.parent))
        for path in LAB.rglob("*.py")
        if any(module.split(".")[0] == library for module in imports(path))
    }
    assert places == ONLY_IN[library]


@pytest.mark.parametrize(
    "module", ["lab.config", "lab.cli", "lab.study", *(f"lab.{command}" for command in COMMANDS)]
)
def test_help_and_settings_need_no_torch(module: str) -> None:
    check = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0
