"""Fixtures: commands as users type them, and ranks as processes."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import HANG_S, compositions, lock_lookups, rank_server, round_products_once
from tests.support.commands import Finished, run_module

__all__ = ["Finished"]

lock_lookups()
round_products_once()
compositions.share()

# A shell's background job ignores Ctrl-C, and so would the commands that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parents[1]
LAUNCHER = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Give a test the same random numbers in every run."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def _forked_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return rank_server.start(tmp_path_factory.mktemp("ranks"))


@pytest.fixture
def real_environment() -> dict[str, str]:
    """Environment of commands under test: one thread per rank, tests importable."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


@pytest.fixture
def environment(real_environment: dict[str, str], _forked_ranks: dict[str, str]) -> dict[str, str]:
    """The same, in which torchrun's ranks are forks of a process that has imported torch."""
    return real_environment | _forked_ranks


@pytest.fixture
def command(tmp_path: Path, environment: dict[str, str]) -> Callable[..., Finished]:
    """Run `python -m MODULE ARGUMENTS` in a directory of its own."""

    def run(module: str, *arguments: str, timeout_s: float = HANG_S) -> Finished:
        return run_module(module, arguments, tmp_path, environment, timeout_s)

    return run


@pytest.fixture
def train(command: Callable[..., Finished]) -> Callable[..., Finished]:
    """Run `torchrun --nproc-per-node N -m lab.train ARGUMENTS` on the CPU."""

    def run(num_ranks: int, *arguments: str) -> Finished:
        launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
        return command(*launcher, "-m", "lab.train", "device=cpu", *arguments)

    return run


def record(directory: Path) -> dict[str, Any]:
    """The record of the run in `directory`."""
    return json.loads((directory / "record.json").read_text())


def wait_for(condition: Callable[[], Any], every_s: float = 0.05) -> None:
    """Wait until `condition` holds; ask every `every_s` seconds."""
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(every_s)
