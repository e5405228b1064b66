"""Ranks as launchers start them: their places, nodes and end. It imports no torch."""

from __future__ import annotations

import atexit
import ctypes
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import torch.distributed as dist

Nodes = Sequence[Sequence[int]]  # the ranks of each node, in rank order
PR_SET_PDEATHSIG = 1  # of sys/prctl.h
ENDING = (signal.SIGTERM, signal.SIGUSR1)
REPORT_S = 10.0  # for rank 0 to report an error
TOLD_S = 1.0  # for the first rank of a host to report one that all ranks know


@dataclass(frozen=True)
class RankInfo:
    """One rank among those started together.

    Attributes:
        launcher: "torchrun", "horovodrun", "python" (no launcher, one rank), or "env" (something
            else set RANK and the like, such as srun in launch/slurm.sbatch).
        store: key-value store that all ranks reach.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    store: dist.Store


def nodes_of(places: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Group ranks by node.

    Launchers number the ranks of a node upwards, whether they fill one node after the other or go
    round them. So the k-th rank with local rank l is on the k-th of the nodes with more than l.

    Args:
        places: local_rank and local_size of each rank, in rank order.

    Raises:
        ValueError: no launcher would number ranks so.
    """
    sizes = [size for local_rank, size in places if local_rank == 0]
    nodes: list[list[int]] = [[] for _ in sizes]
    for local_rank in range(max(sizes, default=0)):
        there = [node for node, size in zip(nodes, sizes, strict=True) if size > local_rank]
        ranks = [rank for rank, place in enumerate(places) if place[0] == local_rank]
        for node, rank in zip(there, ranks, strict=False):
            node.append(rank)
    if [len(node) for node in nodes] != sizes or sum(sizes) != len(places):
        numbered = ", ".join(f"{local} of {size}" for local, size in places)
        raise ValueError(
            f"LOCAL_RANK of LOCAL_WORLD_SIZE: the {len(places)} ranks have {numbered}; a node of n "
            "ranks has 0 to n-1 of n"
        )
    return nodes


def each_alone(size: int) -> list[list[int]]:
    return [[rank] for rank in range(size)]


def restricted(nodes: Nodes, members: Sequence[int]) -> list[list[int]]:
    """Return the nodes of a group, whose ranks are numbered in the order of `members`."""
    number = {rank: index for index, rank in enumerate(members)}
    kept = ([number[rank] for rank in node if rank in number] for node in nodes)
    return [node for node in kept if node]


def world_size() -> int:
    """Return the number of ranks; they need not have joined yet.

    Raises:
        ValueError: a launcher's variable says something else than a number of ranks.
    """
    return _number("HOROVOD_SIZE", "WORLD_SIZE")


def local_size() -> int:
    """Return the number of ranks on this host; ValueError as of `world_size`."""
    return _number("HOROVOD_LOCAL_SIZE", "LOCAL_WORLD_SIZE")


def place() -> tuple[int, int, int, int]:
    """Return this rank, their number, and both on this host, as torchrun sets them."""
    size, local_size = _read("WORLD_SIZE"), _read("LOCAL_WORLD_SIZE")
    return _read("RANK", 0, size), size, _read("LOCAL_RANK", 0, local_size), local_size


def _number(*names: str) -> int:
    """Return the number of ranks in the first of these variables that is set; 1 if none is."""
    return next((_read(name) for name in names if os.environ.get(name)), 1)


def _read(name: str, least: int = 1, end: int = 10**6) -> int:
    text = os.environ.get(name, "")
    if not (text.isdecimal() and len(text) < 8 and least <= int(text) < end):
        allowed = f"from {least} to {end - 1}"
        raise ValueError(f"{name}={text}: must be a number {allowed}, as launchers set it")
    return int(text)


def was_launched() -> bool:
    """Return whether a launcher started this process as a rank."""
    return "HOROVOD_RANK" in os.environ or "RANK" in os.environ


def is_first_rank() -> bool:
    """Return whether this process is rank 0; the ranks need not have joined yet."""
    return (os.environ.get("HOROVOD_RANK") or os.environ.get("RANK") or "0") == "0"


def let_first_rank_report() -> None:
    """Wait so long that a launcher ends this rank, unless rank 0 hangs or is on another host.

    An error that all ranks have is reported by rank 0, with which a launcher ends the others.
    """
    if not is_first_rank():
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a run would stop only after its step
        time.sleep(REPORT_S)


def reports_for_host() -> bool:
    """Return whether this rank is its host's first, which reports what all ranks know.

    The others come back a second later: a launcher that sees one end ends the first as well.
    """
    local = os.environ.get("HOROVOD_LOCAL_RANK") or os.environ.get("LOCAL_RANK") or "0"
    if local != "0":
        time.sleep(TOLD_S)
    return local == "0"


def end_on_signals(command: str) -> None:
    """End at SIGTERM or SIGUSR1 with a line, until a run's watchdog takes these signals.

    A torchrun that dies sends SIGTERM too. A handler would not run while the main thread waits in
    a library for other ranks, so a thread of its own reads signals from the wake-up pipe.
    """
    signal.set_wakeup_fd(_pipe_to_end(command), warn_on_full_buffer=False)
    for number in ENDING:  # last: from now on a signal only fills the pipe
        signal.signal(number, lambda *_: None)
    _end_with_torchrun()


@cache
def _pipe_to_end(command: str) -> int:
    """Start a thread that ends the process; return the pipe's end that takes signals for it."""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    threading.Thread(target=_end_at_signal, args=(command, read_end), daemon=True).start()
    return write_end


def _end_at_signal(command: str, read_end: int) -> None:
    while (number := os.read(read_end, 1)[0]) not in ENDING:
        pass  # such as SIGINT, which Python handles
    if is_first_rank():
        name = signal.Signals(number).name
        line = f"{command}: error: stopped by {name} before the run had begun\n"
        os.write(sys.stderr.fileno(), line.encode())
    os._exit(1)  # not 75: a job whose time ends here would be requeued forever


def _end_with_torchrun() -> None:
    """Ask Linux for SIGTERM when torchrun dies: killed, it cannot end its ranks itself."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() == 1 and not re.search(b"python|torch", Path("/proc/1/cmdline").read_bytes()):
        os.kill(os.getpid(), signal.SIGTERM)  # it died before: its ranks are init's now


def launch_id(arguments: list[str]) -> str | None:
    """Identify all starts of one command within one job; None without a job.

    torchrun's --rdzv-id names a job, or LAB_JOB, which launch/slurm.sbatch sets. The number of
    starts cannot be read: torchrun counts only the failures that each node saw.
    """
    job = os.environ.get("LAB_JOB") or os.environ.get("TORCHELASTIC_RUN_ID")
    if job is None or job == "none":  # torchrun's name for a job without an id
        return None
    return " ".join([job, *arguments])


def run_as_process(main: Callable[[list[str]], int]) -> NoReturn:
    """Run a command that imports torch, and exit with its code, but without Python's teardown.

    Torch's takes a second, which is many on a busy machine, and has aborted. What is registered
    with atexit meanwhile still runs.
    """
    codes: list[int] = []

    def end() -> None:
        if codes and "NSYS_PROFILING_SESSION_ID" not in os.environ:  # nsys writes at a whole exit
            end_process(codes[0])

    atexit.register(end)  # the first registered runs last
    codes.append(main(sys.argv[1:]))
    sys.exit(codes[0])


def end_process(code: int) -> NoReturn:
    """Exit at once, even if threads wait for ranks that will never answer."""
    for stream in (sys.stdout, sys.stderr):
        if stream:  # Python has none if it was closed
            with suppress(OSError):  # its reader is gone, or its disk is full
                stream.flush()
    os._exit(code)
