"""Standard streams that are closed, full or unread: never a traceback, never a lost run."""

from __future__ import annotations

import json
import os
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import HANG_S
from tests.support.slow import some_of

STREAMS = {
    ">/dev/full": 1,
    "2>/dev/full": 0,
    ">/dev/full 2>/dev/full": 1,
    ">&-": 0,
    "2>&-": 0,
    "<&- >&- 2>&-": 0,
}
TRAIN = "lab.train device=cpu model=mlp data=synthetic data.num_images=64 batch_size=8 steps=3"


def shell(
    module: str, streams: str, folder: Path, umask: int = -1, **variables: str
) -> subprocess.CompletedProcess[str]:
    line = f"{shlex.quote(sys.executable)} -m {module} {streams}"
    return subprocess.run(
        ["bash", "-c", line],
        cwd=folder, env=os.environ | variables, umask=umask,
        capture_output=True, text=True, timeout=HANG_S,
    )  # fmt: skip


@pytest.mark.parametrize("streams", STREAMS)
@pytest.mark.parametrize(
    "module",
    some_of(
        ["lab.plot --help", "lab.train --cfg job device=cpu", "lab.explain nowhere"],
        also=["lab.plot --help"],
    ),
)
def test_commands(module: str, streams: str, tmp_path: Path) -> None:
    done = shell(module, streams, tmp_path)
    refused = "nowhere" in module
    assert done.returncode == (2 if refused else STREAMS[streams])
    if streams == ">/dev/full" and not refused:
        name = module.split()[0]
        assert done.stderr == f"{name}: error: standard output: No space left on device\n"
    elif "2>" not in streams and not refused:
        assert done.stderr == ""


@pytest.mark.parametrize("streams", some_of(STREAMS, every=9))
def test_a_run_is_recorded_and_done(streams: str, tmp_path: Path) -> None:
    done = shell(f"{TRAIN} cell=a", streams, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    record = json.loads((tmp_path / "runs/default/a/record.json").read_text())
    assert (record["status"], record["num_steps"]) == ("done", 3)


def test_a_terminal_of_ascii_gets_the_whole_summary_and_files_have_the_users_umask(
    tmp_path: Path,
) -> None:
    line = f"{TRAIN} cell=a checkpoint_every=3"
    done = shell(line, "", tmp_path, umask=0o027, PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert done.stdout.startswith("done: ") and "\nrecord          runs/" in done.stdout
    modes = {
        path.relative_to(tmp_path).as_posix(): stat.S_IMODE(path.stat().st_mode)
        for path in (tmp_path / "runs").rglob("*")
    }
    assert len(modes) > 8
    wrong = {name: oct(mode) for name, mode in modes.items() if mode not in (0o640, 0o750)}
    assert wrong == {}
