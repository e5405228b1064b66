"""Memory that all ranks of a node read and write: a file that they map, or GPUs' symmetric memory.

What stands in the way of it on any rank is told to all, so that they agree to do without.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from lab.distributed.comm import Comm, NoWindow, Window

IN_MEMORY = "/dev/shm"  # files there are in memory alone
TEXT_BYTES = 512  # of what a rank tells others
CPU = torch.device("cpu")


def in_file(comm: Comm, num_bytes: int) -> Window:
    """Return a window in memory of the host, which all ranks map.

    Its file has no name any more when this returns, so nothing is left of it when they end.

    Raises:
        NoWindow: it does not fit, or a rank does not see it, as in a container of its own.
    """
    row_bytes = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    path, problem = "", ""
    if comm.rank == 0:
        try:
            path = _new_file(comm.size * row_bytes)
        except OSError as error:
            problem = _of(error)
    try:
        _agree(comm, problem, CPU)
        rows = torch.empty(0)
        try:
            rows = _mapped(_tell(comm, path, CPU)[0], comm.size, row_bytes)
        except OSError as error:
            problem = _of(error)
        _agree(comm, problem, CPU)
    finally:
        if path:
            Path(path).unlink()
    return Window(rows[:, :num_bytes])


def _new_file(num_bytes: int) -> str:
    """Return the path of a new file of zeros, all of which is in memory.

    Raises:
        OSError: there is no folder for it, or not as much memory.
    """
    descriptor, path = tempfile.mkstemp(prefix="lab-window-", dir=IN_MEMORY)
    try:
        # Of a file that is only made longer, a page that does not fit ends the process.
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError:
        Path(path).unlink()
        raise
    finally:
        os.close(descriptor)
    return path


def _mapped(path: str, size: int, row_bytes: int) -> Tensor:
    with Path(path).open("r+b") as file:
        memory = mmap.mmap(file.fileno(), size * row_bytes)
    return torch.frombuffer(memory, dtype=torch.uint8).view(size, row_bytes)  # keeps `memory`


def symmetric(comm: Comm, group: dist.ProcessGroup, num_bytes: int, device: torch.device) -> Window:
    """Return a window of GPUs' symmetric memory (torch.distributed._symmetric_memory).

    Raises:
        NoWindow: this torch has none, or a GPU does not reach another one's memory.
    """
    _agree(comm, _unreachable(comm, device), device)
    window, problem = Window(()), ""
    try:
        import torch.distributed._symmetric_memory as memory

        own = memory.empty(num_bytes, dtype=torch.uint8, device=device).zero_()
        handle = memory.rendezvous(own, group)
        rows = [handle.get_buffer(rank, (num_bytes,), torch.uint8) for rank in range(comm.size)]
        window = Window((*rows[: comm.rank], own, *rows[comm.rank + 1 :]), handle)
    except (ImportError, AttributeError, RuntimeError) as error:  # of torch, or of the driver
        problem = _of(error)
    _agree(comm, problem, device)
    return window


def _unreachable(comm: Comm, device: torch.device) -> str:
    """Name a GPU whose memory this rank's does not reach; empty: all that are seen, it does.

    Where ranks see their own GPU alone, only a trial shows it.
    """
    others = {int(index) for index in _tell(comm, str(device.index), device)}
    if len(others) < comm.size:
        return ""
    for other in others - {device.index}:
        seen = max(other, device.index) < torch.cuda.device_count()
        if seen and not torch.cuda.can_device_access_peer(device.index, other):
            return f"GPU {device.index} has no access to the memory of GPU {other}"
    return ""


def _agree(comm: Comm, problem: str, device: torch.device) -> None:
    """Go on if no rank has a problem.

    Raises:
        NoWindow: one has; it is the first one's on all ranks.
    """
    for rank, told in enumerate(_tell(comm, problem, device)):
        if told:
            raise NoWindow(f"rank {rank}: {told}")


def _tell(comm: Comm, text: str, device: torch.device) -> list[str]:
    """Return every rank's text, cut to TEXT_BYTES."""
    texts = torch.zeros(comm.size, TEXT_BYTES, dtype=torch.uint8)
    encoded = list(text.encode()[:TEXT_BYTES])
    texts[comm.rank, : len(encoded)] = torch.tensor(encoded, dtype=torch.uint8)
    texts = texts.to(device)
    with comm.traffic.uncounted():
        comm.all_reduce(texts)  # whose order among other collectives is that of first stages
    rows = texts.cpu().numpy()
    return [row.tobytes().rstrip(b"\0").decode(errors="replace") for row in rows]


def _of(error: Exception) -> str:
    line = next(filter(str.strip, str(error).splitlines()), type(error).__name__)
    return line.strip()
