"""The launch scripts refuse what they cannot start, and start what they are told."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, Finished

NODE = ("node.sh", "--rendezvous", "a:1", "--job", "a", "--nodes", "1", "--ranks", "1")


def run(name: str, *arguments: str, path: str = os.environ["PATH"]) -> Finished:
    line = ["bash", str(ROOT / "launch" / name), *arguments]
    done = subprocess.run(line, env={"PATH": path}, capture_output=True, text=True, timeout=30)
    return Finished(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def launchers(tmp_path: Path) -> str:
    """A PATH on which launchers show what they would have started."""
    for name in ("torchrun", "horovodrun"):
        program = tmp_path / name
        program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
        program.chmod(0o755)
    return f"{tmp_path}:{os.environ['PATH']}"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (("local.sh", "--ranks", "abc"), "--ranks abc: must be a number of at least 1"),
        (("local.sh", "--ranks", "0"), "--ranks 0: must be a number of at least 1"),
        (("local.sh", "--rank", "2"), "--rank: no such option (--help)"),
        (("local.sh", "steps=2", "--ranks", "2"), "--ranks: options come before settings"),
        (("node.sh", "--nodes", "1"), "--rendezvous is missing (--help)"),
        ((*NODE, "--nodes", "2:1"), "--nodes 2:1: must be N or MIN:MAX"),
        ((*NODE, "--nodes", "0"), "--nodes 0: must be N or MIN:MAX"),
        ((*NODE, "--ranks", "x"), "--ranks x: must be a number of at least 1"),
        ((*NODE, "--rendezvous", "a:b"), "--rendezvous a:b: must be HOST:PORT"),
        ((*NODE, "--wait", "x"), "--wait x: must be a number"),
        ((*NODE, "--restarts", "-1"), "--restarts -1: must be a number"),
        ((*NODE, "--job"), "--job needs a value"),
        (("horovod.sh", "steps=2"), "--ranks is missing (--help)"),
        (("horovod.sh", "--ranks", "0"), "--ranks 0: must be a number of at least 1"),
    ],
)
def test_wrong_options(launchers: str, line: tuple[str, ...], message: str) -> None:
    done = run(*line, path=launchers)
    assert done.code == 2
    assert done.err.splitlines() == [f"{line[0]}: error: {message}"]


def test_without_the_environment_it_is_named(tmp_path: Path) -> None:
    for tool in ("bash", "sed"):
        (tmp_path / tool).symlink_to(f"/bin/{tool}")
    for line in (("local.sh", "--ranks", "1"), NODE, ("horovod.sh", "--ranks", "1")):
        done = run(*line, path=str(tmp_path))
        assert done.code == 2
        assert "is not on the PATH; first: " in done.err


@pytest.mark.parametrize(
    "line", [("local.sh", "--ranks", "2"), NODE, ("horovod.sh", "--ranks", "2")]
)
def test_settings_reach_the_ranks_as_they_were_written(
    launchers: str, line: tuple[str, ...]
) -> None:
    nasty = ["model.hidden=[8, 8]", "data.path='it'", 'cell="a b"', "a=$HOME;`x`\\n*"]
    done = run(*line, *nasty, path=launchers)
    assert done.code == 0, done.err
    assert done.out.splitlines()[-len(nasty) :] == nasty
    assert "lab.train" in done.out.splitlines()


def test_node_that_has_the_rendezvous_hosts_it_however_it_is_spelled(launchers: str) -> None:
    for address, hosts in (("127.0.0.1", True), ("10.9.9.9", False)):
        addressed = (*NODE, "--rendezvous", "localhost:1", "--address", address)
        done = run(*addressed, path=launchers)
        assert done.code == 0, done.err
        assert ("is_host=true" in done.out) == hosts


@pytest.mark.parametrize("name", ["local.sh", "node.sh", "horovod.sh"])
def test_help(name: str) -> None:
    done = run(name, "--help", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert done.code == 0
    assert f"launch/{name}" in done.out
