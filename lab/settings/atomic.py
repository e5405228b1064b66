"""Files that are either whole or absent."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO


def open_lock(path: Path) -> IO[str]:
    """Open a file to lock, which changes nothing in it; a pipe there would not hold it up.

    Raises:
        OSError: it is a link, perhaps to what its owner keeps, or cannot be opened.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o666), "w")


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Call `write` with a temporary path, sync the result to disk, then rename it.

    What earlier writers of the same file left as they were killed is removed.

    Raises:
        OSError: the directory cannot be written.
    """
    host = socket.gethostname().replace(".", "-")  # several may share the directory
    prefix = f".{path.name}.{host}-"
    for left in _of_killed(path.parent, prefix):
        left.unlink(missing_ok=True)
    temporary = path.with_name(f"{prefix}{os.getpid()}")
    try:
        write(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _of_killed(folder: Path, prefix: str) -> Iterator[Path]:
    """Find temporary files of this host's processes that are no more."""
    for path in folder.iterdir():
        pid = path.name.removeprefix(prefix)
        if pid != path.name and pid.isdecimal() and not _is_alive(int(pid)):
            yield path


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # another user's
        pass
    return True
