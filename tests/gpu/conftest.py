"""Tests that need a GPU: `make gpu` runs them and writes gpu.log.

LAB_TEST_DEVICE=cuda, as `make gpu` sets it, wants a GPU; without it the tests are skipped where
there is none. LAB_TEST_DEVICE=cpu runs the same cases on a CPU, to find mistakes in the tests.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from lab.distributed.world import is_available, torch_build
from lab.measure.environment import environment, git_commit

WANTED = os.environ.get("LAB_TEST_DEVICE")
DEVICE = WANTED or "cuda"


def pytest_sessionstart() -> None:
    """Refuse to run where GPUs are wanted and there is none: all skipped would look like success.

    Raises:
        pytest.UsageError: pytest prints it as one line.
    """
    if WANTED == "cuda" and not is_available():
        raise pytest.UsageError(f"LAB_TEST_DEVICE=cuda: no GPU that {torch_build()} can use")


def pytest_report_header() -> list[str]:
    """Hardware and versions, at the head of the log."""
    return json.dumps({**git_commit(), **environment(1)}, indent=2).splitlines()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/gpu" not in item.path.as_posix():
            continue
        item.add_marker(pytest.mark.gpu)
        item.add_marker(pytest.mark.timeout(320))  # ends a hang
        if DEVICE == "cuda" and not is_available():
            item.add_marker(pytest.mark.skip(reason="no GPU here"))


@pytest.fixture(autouse=True)
def own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
