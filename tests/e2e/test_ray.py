"""Sweeps whose cells Ray places on its nodes: two of them, on this machine."""

from __future__ import annotations

import contextlib
import importlib.util
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

import psutil
import pytest

from tests.conftest import record, wait_for
from tests.support import HANG_S
from tests.support.commands import begun
from tests.support.ports import free_port

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="Ray is not installed: the extra ray"
    ),
    pytest.mark.xdist_group("ray"),
]
SMALL = ("device=cpu", "batch_size=24", "data.size=16", "optim.lr=0.01")
# Cells that begin after the first five wait until the test lets them go on.
COUNTING = """
import pathlib, time
class Counting:
    def __init__(self, file):
        self.file = pathlib.Path(file)
    def add(self, event):
        with self.file.open("a") as file:
            file.write(f"{event} {self.cell}\\n")
    def start(self, directory, *_):
        self.cell = directory.name
        self.add("began")
        late = self.file.read_text().count("done ") >= 5
        while late and not self.file.with_name("go").exists():
            time.sleep(0.05)
    def log(self, *_):
        pass
    def finish(self, record):
        self.add(record.status)
"""


class Node:
    """A Ray node: `ray start --block`, and the processes that it starts."""

    def __init__(self, environment: dict[str, str], *options: str) -> None:
        line = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=1"]
        line += [
            "--min-worker-port=0",
            "--max-worker-port=0",
        ]  # any: free_port's may be in the range
        self._process = subprocess.Popen(
            [*line, "--disable-usage-stats", *options],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self._process.stdout
        said = list(takewhile(lambda line: "Ray runtime started" not in line, self._process.stdout))
        assert self._process.poll() is None, "".join(said)

    def lose(self) -> None:
        """Kill what connects the node with the others, as its machine's end does."""
        for process in self._children():
            if process.name() == "raylet":
                process.kill()

    def end(self) -> None:
        for process in [*self._children(), psutil.Process(self._process.pid)]:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._process.communicate()

    def ranks(self) -> list[psutil.Process]:
        """Find what runs a cell on the node."""
        found = []
        for process in self._children():
            with contextlib.suppress(psutil.Error):
                found += [process] if "lab.train" in process.cmdline() else []
        return found

    def _children(self) -> list[psutil.Process]:
        return psutil.Process(self._process.pid).children(recursive=True)


@pytest.fixture
def nodes(environment: dict[str, str]) -> Iterator[list[Node]]:
    """Start two nodes with a CPU each; commands of the lab find them."""
    environment["RAY_AUTH_MODE"] = "disabled"  # else a second node needs the head's token
    environment["RAY_ADDRESS"] = address = f"127.0.0.1:{(port := free_port())}"
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as folder:  # sockets' paths: short
        here = ("--include-dashboard=false", f"--temp-dir={folder}")
        started = [Node(environment, "--head", f"--port={port}", *here)]
        try:
            started.append(Node(environment, f"--address={address}"))
            yield started
        finally:
            for node in started:
                node.end()


def sweep(environment: dict[str, str], folder: Path, *grid: str) -> subprocess.Popen[str]:
    return begun(environment, folder, "lab.sweep", "launcher=ray", "study=s", *SMALL, *grid)


def test_cells_of_a_lost_node_run_on_the_other_and_none_is_done_twice(
    nodes: list[Node], environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "counting.py").write_text(COUNTING)
    counts = tmp_path / "counts"
    counts.touch()
    grid = ("strategy=none", "seed=1,2,3,4,5,6,7,8,9,10,11,12", "steps=6")
    recorder = ("recorder=csv", "recorder._target_=counting.Counting", f"+recorder.file={counts}")
    process = sweep(environment, tmp_path, *grid, *recorder)

    def events() -> Counter[str]:
        return Counter(line.split()[0] for line in counts.read_text().splitlines())

    def is_over(rank: psutil.Process) -> bool:
        return not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE

    # Both nodes are in the middle of a cell.
    wait_for(lambda: events()["done"] >= 5 and events()["began"] - events()["done"] == 2)
    ranks = nodes[1].ranks()
    assert ranks
    nodes[1].lose()
    wait_for(lambda: all(is_over(rank) for rank in ranks))
    counts.with_name("go").touch()
    out, _ = process.communicate(timeout=HANG_S)
    assert "12 of 12 cells done" in out
    assert out.count("its Ray node was lost; the cell starts again") == 1

    lines = Counter(counts.read_text().splitlines())
    cells = [path.parent for path in (tmp_path / "runs/s").glob("*/record.json")]
    assert len(cells) == 12
    assert all(lines[f"done {cell.name}"] == 1 for cell in cells)
    assert sum(lines[f"began {cell.name}"] for cell in cells) == 13
    assert all(len(record(cell)["attempts"]) == 1 for cell in cells)

    again, _ = sweep(environment, tmp_path, *grid, *recorder).communicate(timeout=HANG_S)
    assert again.count("done already") == 12
    assert Counter(counts.read_text().splitlines()) == lines


def test_a_cell_too_large_is_refused_and_ctrl_c_leaves_no_rank(
    nodes: list[Node], environment: dict[str, str], tmp_path: Path
) -> None:
    refused = sweep(environment, tmp_path, "world_size=2", "steps=6")
    out, _ = refused.communicate(timeout=HANG_S)
    assert refused.returncode == 2
    line = out.splitlines()[-1]
    assert "world_size=2: launcher=ray runs a cell on one node, which needs 2 CPUs" in line

    process = sweep(environment, tmp_path, "steps=1000000", "seed=1,2,3")
    wait_for(lambda: all(node.ranks() for node in nodes))
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=HANG_S)
    assert (process.returncode, "run the same command to continue" in out) == (130, True)
    assert not any(node.ranks() for node in nodes)
