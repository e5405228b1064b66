"""Emulated clusters: the rates of their links, training on them, and cleanup."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from lab.cluster import sandbox
from lab.cluster.settings import Cluster
from lab.settings.config import ConfigError
from tests.conftest import Finished, record, wait_for
from tests.support import HANG_S
from tests.support.slow import some_of

Command = Callable[..., Finished]
QUICK = ("device=cpu", "data.size=16", "batch_size=24", "optim.lr=0.01", "warmup_steps=2")
TWO_HOSTS = ("cluster=emulated", "cluster.hosts=2", "cell=a")


def problem() -> str:
    try:
        sandbox.find(Cluster(1, ("1gbit",)))
        return ""
    except ConfigError as error:
        return str(error)


pytestmark = [
    pytest.mark.skipif(bool(problem()), reason=problem() or "-"),
    pytest.mark.xdist_group("hosts"),  # others there make namespaces too
]


def test_links_give_what_was_asked_for(command: Command) -> None:
    # Rates that a busy machine has too.
    done = command("lab.cluster", "check", "hosts=2", "rates=[30mbit,10mbit]")
    assert done.code == 0, done.out + done.err
    rows = [line.split() for line in done.out.splitlines()[1:]]
    assert [(row[0], row[1], row[-1]) for row in rows] == [
        ("h0", "30mbit", "ok"),
        ("h1", "10mbit", "ok"),
    ]


def test_training_on_two_hosts(command: Command, tmp_path: Path) -> None:
    changes = 'cluster.changes=["0s h1 200mbit"]'
    done = command("lab.train", "strategy=onebit", "steps=6", changes, *TWO_HOSTS, *QUICK)
    assert done.code == 0, done.err
    found = record(tmp_path / "runs" / "default" / "a")
    assert found["status"] == "done"
    assert found["world_size"] == found["environment"]["num_hosts"] == 2
    hosts = "2 hosts as network namespaces, links of 1gbit (tbf), h1 200mbit after 0 s"
    assert found["emulation"][0] == {"kind": "hosts", "detail": hosts}


@pytest.mark.slow
def test_two_levels_cross_a_link_with_what_the_formula_says(
    command: Command, tmp_path: Path
) -> None:
    cluster = ("cluster=emulated", "cluster.hosts=2", "cluster.ranks_per_host=2", "world_size=4")
    exchanges = ("exchange=onebit,hierarchical,hierarchical_onebit", "sizes=[4MiB]", "rounds=1")
    done = command("lab.bench", "collective", *cluster, *exchanges, "device=cpu", "out=all.json")
    assert done.code == 0, done.err
    result = json.loads((tmp_path / "all.json").read_text())
    rows = {row["algorithm"]: row for row in result["rows"]}
    assert not any(row["wrong"] for row in rows.values())
    size, scales = 2**22, 8 * 2**20 / 1024  # two scales for each row of 1024 values
    expected = {
        "allreduce": 2 * size * 3 / 4,
        "hierarchical": size,
        "hierarchical_onebit": size / 32 + scales,
    }
    for name, formula in expected.items():
        assert rows[name]["across_bytes"] == pytest.approx(formula, rel=0.01)
    for name in (*expected, "onebit"):
        counted, sent = rows[name]["link_bytes"], rows[name]["across_bytes"]
        assert sent < counted < 1.05 * sent
    assert rows["sendrecv"]["across_bytes"] == 2 * size  # both ranks of a host send at once


@pytest.mark.slow
def test_the_exit_code_is_that_of_the_launcher(command: Command) -> None:
    done = command("lab.cluster", "run", "hosts=2", "--", "--nproc-per-node=x", "-m", "lab.train")
    assert done.code == 1
    assert "h1: " in done.err


@pytest.mark.slow
def test_ranks_that_are_asked_to_stop_leave_a_record(
    environment: dict[str, str], tmp_path: Path
) -> None:
    process = start(environment, tmp_path)
    wait_for(lambda: list(tmp_path.rglob("step_*/DONE")) or process.poll() is not None)
    assert process.poll() is None, (tmp_path / "errors").read_text()
    process.terminate()
    assert process.wait(HANG_S) != 0
    assert record(tmp_path / "runs" / "default" / "a")["status"] == "interrupted"


@pytest.mark.parametrize("num_processes", some_of([1, 2, 4, 6], also=[4]))
def test_killed_it_leaves_nothing(
    num_processes: int, environment: dict[str, str], tmp_path: Path
) -> None:
    """Kill it once it has made the sandbox, the supervisor, the launchers, or the ranks."""
    before = traces()
    process = start(environment, tmp_path)
    known = psutil.Process(process.pid)
    wait_for(lambda: len(known.children(recursive=True)) >= num_processes)
    process.kill()
    process.wait()
    wait_for(lambda: not processes_in(tmp_path))
    assert traces() == before


def test_killed_before_there_is_a_sandbox_it_leaves_nothing(
    environment: dict[str, str], tmp_path: Path
) -> None:
    """A sandbox made afterwards, here by a slow unshare, ends by itself."""
    unshare = shutil.which("unshare")
    late = tmp_path / "bin" / "unshare"
    late.parent.mkdir()
    late.write_text(
        f'#!/bin/sh\ncase "$*" in *cluster.sandbox*) sleep 2;; esac\nexec {unshare} "$@"\n'
    )
    late.chmod(0o755)
    path = f"{late.parent}:{environment['PATH']}"
    process = start({**environment, "PATH": path}, tmp_path)
    wait_for(lambda: any("cluster.sandbox" in line for line in processes_in(tmp_path)))
    process.kill()
    process.wait()
    assert processes_in(tmp_path)
    wait_for(lambda: not processes_in(tmp_path))


@pytest.fixture
def environment(real_environment: dict[str, str]) -> dict[str, str]:
    """Ranks that are forked elsewhere would not be in the cluster's network."""
    return real_environment


def start(environment: dict[str, str], folder: Path) -> subprocess.Popen[bytes]:
    """Start a training that would take long."""
    settings = (*TWO_HOSTS, *QUICK, "steps=100000", "checkpoint_every=5")
    line = [sys.executable, "-m", "lab.train", *settings]
    with (folder / "errors").open("wb") as errors:
        return subprocess.Popen(line, cwd=folder, env=environment, stderr=errors)


def processes_in(folder: Path) -> list[str]:
    """List the command lines of processes in a folder, as all of a cluster's are."""
    found = [each.info for each in psutil.process_iter(["cwd", "cmdline"])]
    # A process that ends during the query has no command line.
    return [" ".join(each["cmdline"] or []) for each in found if each["cwd"] == str(folder)]


def traces() -> list[str]:
    """List this machine's namespaces, interfaces and mounts, without other tests' hosts."""
    commands = (["ip", "netns", "list"], ["ip", "-br", "link"])
    seen = [subprocess.run(each, capture_output=True, text=True).stdout for each in commands]
    lines = "".join([*seen, Path("/proc/self/mounts").read_text()]).splitlines()
    theirs = ("lab-", " /run/netns ")  # the second: ip's folder of names, once a name was made
    return [line for line in lines if not any(name in line for name in theirs)]
