"""Files that are either whole or absent."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Call `write` with a temporary path, sync the result to disk, then rename it.

    Raises:
        OSError: the directory cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
