"""Ranks that the lab starts on one host: no other host can reach anything of theirs."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.conftest import Finished, wait_for
from tests.support import HANG_S

LISTENS = "0A"  # a state in /proc/net/tcp
LOOPBACK = ("0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000")


def sockets(process: int) -> set[str]:
    """Return the inodes of all sockets of a process and its children."""
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    found = set[str]().union(*(sockets(int(child)) for child in children))
    for descriptor in Path(f"/proc/{process}/fd").iterdir():
        try:
            name = str(descriptor.readlink())
        except OSError:
            continue
        if name.startswith("socket:["):
            found.add(name.removeprefix("socket:[").rstrip("]"))
    return found


def listening(process: int) -> list[str]:
    """Return the addresses, as the kernel writes them, at which a process' tree listens."""
    own, found = sockets(process), []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == LISTENS and inode in own:
                found.append(local.partition(":")[0])
    return found


def test_nothing_listens_beyond_loopback_and_arguments_and_exit_codes_are_passed_on(
    tmp_path: Path,
) -> None:
    script, ends = tmp_path / "rank.py", tmp_path / "ends"
    script.write_text(
        "import os, sys, time, torch.distributed as dist\n"
        "os.environ['GLOO_SOCKET_IFNAME'] = 'lo'\n"
        "dist.init_process_group('gloo')\n"
        "dist.barrier()\n"
        f"open(r'{tmp_path}/' + os.environ['RANK'], 'w').close()\n"
        f"while not os.path.exists(r'{ends}'): time.sleep(0.05)\n"
        "os._exit(3 if os.environ['RANK'] == sys.argv[1] else 0)\n"
    )
    line = [sys.executable, "-m", "lab.distributed.torchrun", "--nproc-per-node=2", str(script)]
    process = subprocess.Popen([*line, "1"], stderr=subprocess.PIPE)
    try:
        wait_for(lambda: all((tmp_path / rank).exists() for rank in "01"))
        found = listening(process.pid)
        assert len(found) >= 3  # the store, and Gloo of each rank
        assert set(found) <= set(LOOPBACK)
        ends.touch()
        _, error = process.communicate(timeout=HANG_S)
        assert process.returncode == 1 and b"exitcode  : 3" in error
    finally:
        process.kill()


def test_options_that_torchrun_refuses_take_one_line(command: Callable[..., Finished]) -> None:
    """It has many of its own; a number is refused without a text of its own."""
    done = command("lab.distributed.torchrun", "--nproc-per-node=0", "script.py")
    refused = "--nproc-per-node=0: torchrun does not accept this number"
    assert (done.code, done.out) == (2, "")
    assert done.err == f"lab.distributed.torchrun: error: {refused}\n"


def test_a_signal_ends_it_and_its_ranks_without_a_traceback(tmp_path: Path) -> None:
    script, began = tmp_path / "rank.py", tmp_path / "began"
    script.write_text(f"import os, time\nopen({str(began)!r}, 'w').close()\ntime.sleep({HANG_S})\n")
    line = [sys.executable, "-m", "lab.distributed.torchrun", "--nproc-per-node=1", str(script)]
    process = subprocess.Popen(line, stderr=subprocess.PIPE)
    try:
        wait_for(began.exists)
        process.terminate()
        _, error = process.communicate(timeout=HANG_S)  # until the rank has closed it too
        assert process.returncode == 128 + signal.SIGTERM and b"Traceback" not in error
    finally:
        process.kill()
