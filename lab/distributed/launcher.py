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
import zlib
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
# Launchers that know no torch, and their variables: a rank, the number of ranks, and both on its
# host. The first that has set them is the one: Intel's mpiexec starts its processes by srun.
FOREIGN = {
    "mpirun": (
        *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        *("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ),
    "mpiexec": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
}
OF_JOB = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID", "SLURM_JOB_ID", "SLURM_STEP_ID")
PORTS = (20000, 12000)  # the first that a job may meet at, and how many
REPORT_S = 10.0  # for rank 0 to report an error
TOLD_S = 1.0  # for the first rank of a host to report one that all ranks know


@dataclass(frozen=True)
class RankInfo:
    """One rank among those started together.

    Attributes:
        launcher: "torchrun", "horovodrun", "mpirun", "mpiexec", "srun", "python" (no launcher, one
            rank), or "env" (something else set RANK and the like).
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
            f"LOCAL_RANK of LOCAL_WORLD_SIZE: the {len(places)} ranks have {numbered}; on a node "
            "of n ranks, LOCAL_RANK must be 0 to n-1, and LOCAL_WORLD_SIZE must be n"
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
        ValueError: a launcher's variable says something else than a number of ranks, or there are
            several, but which one this is has not been set.
    """
    size = _number("HOROVOD_SIZE", "WORLD_SIZE")
    if size > 1 and not was_launched():
        raise ValueError(
            f"WORLD_SIZE={size}: RANK is not set; start all ranks with torchrun --nproc-per-node "
            f"{size} -m lab.train, or unset WORLD_SIZE to train on one rank"
        )
    return size


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


def started_by() -> str:
    """Return the launcher that has set RANK and the like, as `RankInfo` names it."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return "torchrun"
    return _foreign() or "env"


def _foreign() -> str:
    return next((name for name, own in FOREIGN.items() if all(map(os.environ.get, own))), "")


def adopt() -> None:
    """Let ranks that mpirun, mpiexec or srun started meet: set RANK and the like from theirs.

    Otherwise each would train alone, as one of several runs of one rank. Ranks of one host meet at
    a port that follows from the job; on several hosts MASTER_ADDR has to name rank 0's, which only
    srun tells.

    Raises:
        ValueError: it does not, or the launcher's variables are no numbers of ranks.
    """
    name = _foreign()
    if not name or "HOROVOD_RANK" in os.environ or "RANK" in os.environ:
        return
    rank, size, local_rank, local_size = FOREIGN[name]
    if _read(size) == 1:
        return
    on_host = _read(local_size) if name != "srun" else _tasks_here(os.environ[local_size])
    address = "127.0.0.1" if on_host == _read(size) else _first_host()
    if not os.environ.setdefault("MASTER_ADDR", address):
        raise ValueError(
            f"MASTER_ADDR=: {name} started ranks on several hosts; MASTER_ADDR must name the host "
            "of rank 0, as in mpirun -x MASTER_ADDR=node1"
        )
    job = " ".join(os.environ.get(variable, "") for variable in OF_JOB).strip() or str(os.getppid())
    first, count = PORTS
    os.environ.setdefault("MASTER_PORT", str(first + zlib.crc32(job.encode()) % count))
    os.environ.update(
        RANK=os.environ[rank],
        WORLD_SIZE=os.environ[size],
        LOCAL_RANK=os.environ[local_rank],
        LOCAL_WORLD_SIZE=str(on_host),
    )


def _tasks_here(per_node: str) -> int:
    """Return the number of a step's tasks on this node, of a list such as "4(x2),3"."""
    counts = list[str]()
    for part in per_node.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        counts += [found[1]] * int(found[2] or 1) if found else []
    node = os.environ.get("SLURM_NODEID", "0")
    if not node.isdecimal() or int(node) >= len(counts):
        raise ValueError(f"SLURM_STEP_TASKS_PER_NODE={per_node} does not list node {node}")
    return int(counts[int(node)])


def _first_host() -> str:
    """Return the first host of SLURM's list, such as "gpu[03-05,9],login" or "a,b"."""
    nodes = os.environ.get("SLURM_STEP_NODELIST", "")
    found = re.match(r"([^\[,]+)(?:\[(\w+)[^\]]*\]([^,]*))?", nodes)
    return f"{found[1]}{found[2] or ''}{found[3] or ''}" if found else ""


def was_launched() -> bool:
    """Return whether a launcher started this process as a rank."""
    return "HOROVOD_RANK" in os.environ or "RANK" in os.environ


def is_first_rank() -> bool:
    """Return whether this process is rank 0; the ranks need be neither adopted nor joined yet."""
    names = ["HOROVOD_RANK", "RANK", *(FOREIGN[name][0] for name in filter(None, [_foreign()]))]
    return next(filter(None, map(os.environ.get, names)), "0") == "0"


def let_first_rank_report(*_: object) -> None:
    """Wait so long that a launcher ends this rank, unless rank 0 hangs or is on another host.

    An error that all ranks have is reported by rank 0, with which a launcher ends the others.
    """
    if not is_first_rank():
        if in_main_thread():
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


def in_main_thread() -> bool:
    """Return whether this is the only thread in which Python lets a program handle signals."""
    return threading.current_thread() is threading.main_thread()


def end_on_signals(command: str) -> None:
    """End at SIGTERM or SIGUSR1 with a line, until a run's watchdog takes these signals.

    A torchrun that dies sends SIGTERM too. A handler would not run while the main thread waits in
    a library for other ranks, so a thread of its own reads signals from the wake-up pipe. A command
    that runs in another thread, as in Ray Train's workers, leaves signals to the process's owner.
    """
    if not in_main_thread():
        return
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


def end_with_parent() -> None:
    """Ask Linux for SIGTERM when this process's parent dies: killed, that cannot end it itself."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _end_with_torchrun() -> None:
    if "TORCHELASTIC_RUN_ID" not in os.environ or not sys.platform.startswith("linux"):
        return
    end_with_parent()
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
