"""MB is 10**6 bytes and MiB 2**20, wherever the lab prints or draws a number of bytes."""

from __future__ import annotations

import ast
import re

import numpy as np
import pytest

from lab.benchmarks import catalogue, codec, collective
from tests.conftest import ROOT

MILLION = re.compile(r"\b(1e6|1e-6|10\*\*6)\b")
BINARY = re.compile(r"2\s?\*\*\s?20|1\s?<<\s?20|1024\s?\*\*?\s?(1024|2)|1_?048_?576")


def mistakes(text: str) -> list[str]:
    """List what makes the MB of a file doubtful: a 2**20, or no million anywhere."""
    tree = ast.parse(text)
    alone = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
    strings = (n for n in ast.walk(tree) if isinstance(n, ast.Constant) and n not in alone)
    if not any(isinstance(each.value, str) and "MB" in each.value for each in strings):
        return []
    binary = [line for line in text.splitlines() if BINARY.search(line) and "MiB" not in line]
    return binary if MILLION.search(text) else [*binary, "a string says MB, and nothing is 1e6"]


def test_mb_is_a_million_bytes_in_every_file_that_writes_it() -> None:
    paths = [path.relative_to(ROOT) for path in (ROOT / "lab").rglob("*.py")]
    found = {str(path): mistakes((ROOT / path).read_text()) for path in paths}
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_sizes_and_rates_are_in_millions_and_billions_of_bytes() -> None:
    assert catalogue.size_name(10**8) == "100 MB"
    times = {"allreduce": np.full(3, 0.5)}
    row = collective._row("allreduce", 10**8, times, 0, 2, None)
    assert row["algbw_gb_per_s"] == row["busbw_gb_per_s"] == pytest.approx(0.2)
    assert codec._rate([0.5], 10**8)["gb_per_s"] == pytest.approx(0.2)
