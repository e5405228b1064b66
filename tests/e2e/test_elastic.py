"""Ranks and hosts that are killed while two hosts train.

LAB_KILLS=10 pytest tests/e2e/test_elastic.py kills ten ranks in ten runs instead of one.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from lab.training import checkpoint
from tests.conftest import ROOT, record, wait_for
from tests.distributed.test_resume import sum_of_residuals
from tests.support import HANG_S
from tests.support.hosts import Host, two_hosts
from tests.support.ranks import train

RUN = ("strategy=onebit", "data.size=16", "batch_size=24", "optim.lr=0.01", "warmup_steps=2")
STEPS = 60
PORT = 29400
NUM_KILLS = int(os.environ.get("LAB_KILLS", 1))
pytestmark = pytest.mark.xdist_group("hosts")  # there is one pair of them


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[Host]]:
    with two_hosts() as both:
        yield both


@pytest.fixture(autouse=True)
def own_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


def start(
    host: Host,
    first: Host,
    nodes: str,
    *settings: str,
    ranks: int = 1,
    restarts: int = 3,
    **variables: str,
) -> Any:
    """Start `launch/node.sh` on one host."""
    options = ["--rendezvous", f"{first.address}:{PORT}", "--job", "a", "--nodes", nodes]
    options += ["--ranks", str(ranks), "--restarts", str(restarts), "--wait", "3"]
    options += ["--address", host.address]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    names = {"GLOO_SOCKET_IFNAME": host.interface, "PATH": path}
    return subprocess.Popen(
        [*host.prefix, str(ROOT / "launch" / "node.sh"), *options, "device=cpu", *RUN, *settings],
        env={**os.environ, **names, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait(process: Any) -> None:
    output, _ = process.communicate(timeout=HANG_S)
    assert process.returncode == 0, output[-3000:]


def ranks_of(process: Any) -> list[psutil.Process]:
    """The ranks that a launcher runs now."""
    children = psutil.Process(process.pid).children(recursive=True)
    return [child for child in children if "RANK" in child.environ()]


def kill_tree(process: Any) -> None:
    """Kill the launcher and its ranks at once, as when a host loses power."""
    everything = [process, *psutil.Process(process.pid).children(recursive=True)]
    for one in everything:
        one.send_signal(signal.SIGKILL)
    process.communicate()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train an undisturbed run on two ranks."""
    folder = tmp_path_factory.mktemp("undisturbed")
    place = (f"runs_dir={folder}", "cell=a", "checkpoint_every=10", f"steps={STEPS}")
    train(2, *RUN, *place)
    return folder / "default" / "a"


def last_checkpoint(run: Path) -> Path:
    path = checkpoint.newest(run / "checkpoints")
    assert path is not None
    return path


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(NUM_KILLS))
def test_killed_rank_is_started_again_and_nothing_is_lost(
    hosts: list[Host], undisturbed: Path, seed: int
) -> None:
    draw = random.Random(seed)
    kill = f"{draw.randrange(2)}:{draw.randrange(1, STEPS)}"
    settings = ("cell=a", "checkpoint_every=10", f"steps={STEPS}")
    fault = "exchange._target_=tests.support.faults.OneBitKilled"
    nodes = [start(host, hosts[0], "2", fault, *settings, LAB_TEST_KILL=kill) for host in hosts]
    for node in nodes:
        wait(node)
    ours, theirs = record(Path("runs/default/a")), record(undisturbed)
    assert ours["status"] == "done"
    assert ours["environment"]["num_hosts"] == 2
    assert [attempt["world_size"] for attempt in ours["attempts"]] == [2, 2]
    step = int(kill.split(":")[1])
    assert ours["attempts"][1]["first_step"] == step // 10 * 10
    assert ours["replica_hash"] == theirs["replica_hash"]
    # Residuals, and so delivered + residual = true sum, have the same bits on every rank.
    (_, owns), (_, expected) = (
        checkpoint.load(last_checkpoint(run)) for run in (Path("runs/default/a"), undisturbed)
    )
    for own, other in zip(owns, expected, strict=True):
        for kind, residuals in other["exchange"].items():
            assert residuals
            for name, residual in residuals.items():
                assert torch.equal(own["exchange"][kind][name], residual)


@pytest.mark.slow
def test_first_rank_lost_for_good_leaves_a_record(hosts: list[Host]) -> None:
    """The store in which ranks publish their errors is lost with the rank."""
    settings = ("exchange._target_=tests.support.faults.OneBitKilled", f"steps={STEPS}", "cell=a")
    for node in [
        start(host, hosts[0], "2", *settings, restarts=0, LAB_TEST_KILL="0:5") for host in hosts
    ]:
        node.communicate(timeout=HANG_S)
        assert node.returncode != 0
    found = record(Path("runs/default/a"))
    assert found["status"] == "failed"
    assert "lost another rank" in found["error"]


@pytest.mark.slow
def test_lost_host_leaves_half_the_ranks_which_go_on(hosts: list[Host]) -> None:
    settings = ("checkpoint_every=10", "steps=150")
    staying, lost = (start(host, hosts[0], "1:2", *settings, ranks=2) for host in hosts)
    wait_for(lambda: list(Path("runs").rglob("step_*/DONE")))
    left = ranks_of(staying)
    assert len(left) == 2
    kill_tree(lost)
    wait_for(lambda: not any(rank.is_running() for rank in left))  # they may write one more
    (run,) = Path("runs/default").iterdir()  # named after four ranks, though two continue in it
    newest = last_checkpoint(run)
    shutil.copytree(newest, "kept")
    wait(staying)
    result = record(run)
    first, second = result["attempts"]
    assert (first["world_size"], second["world_size"]) == (4, 2)
    assert second["first_step"] == int(newest.name[-6:])
    assert result["status"] == "done"

    # The same checkpoint on two ranks keeps the sums, and ends with the same weights.
    same = ("resume=kept", *RUN)
    resumed = train(2, *same, f"steps={second['first_step']}", "optim.schedule=constant")
    before = sum_of_residuals([own["exchange"] for own in checkpoint.load(Path("kept"))[1]])
    after = sum_of_residuals([outcome.exchange_state for outcome in resumed])
    for name, total in before.items():
        assert (after[name] - total).norm() / total.norm() < 1e-6
    whole = train(2, *same, "steps=150")
    assert whole[0].record["replica_hash"] == result["replica_hash"]
