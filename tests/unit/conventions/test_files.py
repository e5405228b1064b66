"""Rules for each file of the lab: its length, and how its docstrings begin."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from lab.settings.config import GROUPS, PARTS
from tests.conftest import ROOT

CONF = ROOT / "conf"
LONGEST = 600  # lines: one subject, read alone
SOURCES = [path for path in (ROOT / "lab").rglob("*") if path.suffix in (".py", ".cpp", ".h")]
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings(path: Path) -> list[str]:
    """Docstrings of the file at `path`: the module's, and those of its classes and functions."""
    nodes = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, DOCUMENTED))
    return [text for node in nodes if (text := ast.get_docstring(node))]


def test_no_file_is_longer_than_can_be_read_at_a_sitting() -> None:
    lengths = {str(path): len(path.read_text().splitlines()) for path in SOURCES}
    assert {path: length for path, length in lengths.items() if length > LONGEST} == {}


def test_docstrings_say_what_a_thing_is_or_does_and_do_not_ask() -> None:
    python = [path for path in SOURCES if path.suffix == ".py"]
    asking = [f"{path}: {text}" for path in python for text in docstrings(path)]
    assert [line for line in asking if re.match(r"\S+: What\b", line)] == []


def test_a_class_name_means_one_thing() -> None:
    """A codec and the exchange that sends by it are known by one name, as in `strategy=int8`."""
    python = [path for path in SOURCES if path.suffix == ".py"]
    nodes = (node for path in python for node in ast.parse(path.read_text()).body)
    times = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    several = {name for name, number in times.items() if number > 1}
    assert several == {"Int4", "Int8", "OneBit", "TopK"}


def without_encoding(path: Path) -> Iterator[str]:
    """Find calls that read or write text in an encoding of the locale's (ruff's PLW1514)."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            is_text = node.func.attr in ("read_text", "write_text")
            if is_text and "encoding" not in [keyword.arg for keyword in node.keywords]:
                yield f"{path}:{node.lineno}"


def test_texts_are_utf_8_in_every_locale() -> None:
    python = [path for path in SOURCES if path.suffix == ".py"]
    assert [line for path in python for line in without_encoding(path)] == []


def test_every_setting_of_a_choice_has_a_comment() -> None:
    bare = list[str]()
    for path in (path for group in (*GROUPS[1:], *PARTS) for path in (CONF / group).glob("*.yaml")):
        lines = path.read_text(encoding="utf-8").splitlines()
        for before, line in pairwise(["", *lines]):
            is_data = path.parent.name == "profile" or line.startswith("defaults:")
            if re.match(r"[a-z]\w*:", line) and not ("#" in f"{before[:1]}{line}" or is_data):
                bare.append(f"{path}: {line}")
    assert bare == []
