"""Text as bytes, of any file or folder: every machine has Python's own standard library."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import numpy as np
import torch

from lab.data.files import existing, reading
from lab.data.windows import Windows, split

NUM_BYTES = 256
# Of the standard library; packages are not part of it, and its tests are missing on some systems.
LEFT_OUT = ("site-packages", "dist-packages", "test", "tests")


def text(
    *,
    seed: int,
    device: torch.device,
    path: str | None = None,
    suffix: str | None = None,
    context: int = 128,
    test_share: float = 0.1,
) -> Windows:
    """Return the bytes of files, one after the other, as ids below 256; the last are for testing.

    A folder's files are read in the order of their paths, below it too; hidden ones are left out. A
    single file is mapped, so it may be larger than the memory.

    Args:
        seed: unused; the split is always the same.
        device: where batches go.
        path: a file or a folder. None: the .py files of Python's own standard library, as far as
            this machine has them, without its tests.
        suffix: end of the names of the files to read in a folder, such as ".txt"; None: all.
        context: bytes of a sequence.
        test_share: share of the bytes at the end to test on.

    Raises:
        ValueError: an argument out of range, too little text, or a file that cannot be read.
    """
    if path:
        root = existing(path, "give a file or a folder")
        files = [root] if root.is_file() else _below(root, suffix or "")
    else:
        root = Path(sysconfig.get_paths()["stdlib"])
        files = _below(root, suffix or ".py", LEFT_OUT)
    ids = _bytes_of(files)
    if not len(ids):
        reason = "all files are empty" if files else f"no files, with data.suffix={suffix}"
        raise ValueError(f"data.path={root}: holds no text: {reason}")
    source = f"{len(ids):,} bytes of {len(files)} file{'s' * (len(files) > 1)}, {root}"
    train, test = split(ids, test_share)
    return Windows(train, test, context=context, vocabulary=NUM_BYTES, device=device, source=source)


def _below(root: Path, suffix: str, left_out: tuple[str, ...] = ()) -> list[Path]:
    """List the files below `root` that are not hidden, in an order that all machines share."""
    found: list[Path] = []
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if not name.startswith(".") and name not in left_out]
        shown = (name for name in names if name.endswith(suffix) and not name.startswith("."))
        found += [Path(folder, name) for name in shown]
    files = [file for file in found if file.is_file()]
    return sorted(files, key=lambda file: file.relative_to(root).as_posix())


def _bytes_of(files: list[Path]) -> np.ndarray:
    """Return the bytes of all files, uint8 [bytes]; a single file's are mapped, not read."""
    if len(files) == 1 and files[0].stat().st_size:
        with reading(files[0]):
            return np.asarray(np.memmap(files[0], dtype=np.uint8, mode="r"))
    return np.frombuffer(b"".join(map(_read, files)), dtype=np.uint8)


def _read(file: Path) -> bytes:
    with reading(file):
        return file.read_bytes()
