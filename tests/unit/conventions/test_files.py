"""Rules for each file of the lab: its length, and how its docstrings begin."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.conftest import ROOT

LONGEST = 600  # lines: one subject, read alone
SOURCES = [path for path in (ROOT / "lab").rglob("*") if path.suffix in (".py", ".cpp", ".h")]
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings(path: Path) -> list[str]:
    """Docstrings of the file at `path`: the module's, and those of its classes and functions."""
    nodes = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, DOCUMENTED))
    return [text for node in nodes if (text := ast.get_docstring(node))]


def test_sources_of_all_kinds_are_found() -> None:
    assert {path.suffix for path in SOURCES} == {".py", ".cpp", ".h"}
    assert len(docstrings(Path(__file__))) == 2  # of this file, and of the function above


def test_no_file_is_longer_than_can_be_read_at_a_sitting() -> None:
    lengths = {str(path): len(path.read_text().splitlines()) for path in SOURCES}
    assert {path: length for path, length in lengths.items() if length > LONGEST} == {}


def test_docstrings_say_what_a_thing_is_or_does_and_do_not_ask() -> None:
    python = [path for path in SOURCES if path.suffix == ".py"]
    asking = [f"{path}: {text}" for path in python for text in docstrings(path)]
    assert [line for line in asking if re.match(r"\S+: What\b", line)] == []


@pytest.mark.parametrize("package", ["settings", "record", "benchmarks", "gpu_report", "web"])
def test_texts_are_utf_8_in_every_locale(package: str) -> None:
    files = sorted((ROOT / "lab" / package).glob("*.py"))
    bare = re.compile(r"\.read_text\(\)|\.write_text\([^,\n]*\)$", re.MULTILINE)
    assert files and not [file for file in files if bare.search(file.read_text(encoding="utf-8"))]
