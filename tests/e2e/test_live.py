"""A sweep that is watched while it runs, stopped from its page, and started again."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.request
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.conftest import wait_for
from tests.support import HANG_S
from tests.support.commands import begun

CELLS = ("study=watched", "strategy=none,allreduce,onebit", "world_size=1", "baselines=all")
RUN = ("device=cpu", "batch_size=24", "data.size=16", "optim.lr=0.01", "steps=200")


def sweep(environment: dict[str, str], folder: Path, *more: str) -> subprocess.Popen[str]:
    return begun(environment, folder, "lab.sweep", *CELLS, *RUN, *more)


def address_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    for line in process.stdout:
        if found := re.match(r"live: (\S+)", line):
            return found[1]
    raise AssertionError("the sweep printed no address")


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=HANG_S) as answer:
        return answer.read().decode()


@pytest.mark.slow
def test_a_sweep_is_watched_stopped_and_resumed(
    environment: dict[str, str], tmp_path: Path
) -> None:
    first = sweep(environment, tmp_path, "report=live")
    address = address_of(first)
    wait_for(lambda: json.loads(get(f"{address}progress"))["num_drawn"] >= 1)
    page = get(address)
    assert "Stop the sweep" in page
    assert "<h1>watched</h1>" in page

    where = urlsplit(address)
    asking = HTTPConnection(where.hostname or "", where.port, timeout=HANG_S)
    asking.request("POST", f"{where.path}stop")
    assert asking.getresponse().status == 303
    asking.close()
    output, _ = first.communicate(timeout=HANG_S)
    assert first.returncode == 130, output
    assert "the same command" in output

    again = sweep(environment, tmp_path)
    output, _ = again.communicate(timeout=HANG_S)
    assert again.returncode == 0, output
    assert "done already" in output
    assert "3 of 3 cells done" in output
