"""Token ids in files that are mapped, not read: any size, and any tokeniser."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from lab.data.files import existing, reading
from lab.data.windows import Windows, split
from lab.settings import checks

DTYPES = ("uint8", "uint16", "uint32", "int32", "int64")
LAYOUT = "give a folder with train.bin and val.bin (or test.bin), or one file"


def tokens(
    *,
    seed: int,
    device: torch.device,
    path: str | None = None,
    dtype: str = "uint16",
    vocabulary: int | None = None,
    context: int = 128,
    test_share: float = 0.1,
) -> Windows:
    """Return token ids of a file, or of a folder with train.bin and val.bin, as nanoGPT makes it.

    The files hold ids alone, in the machine's byte order (github.com/karpathy/nanoGPT, data/). Its
    meta.pkl is never read: a pickle can run any code.

    Args:
        seed: unused; the split is always the same.
        device: where batches go.
        path: the folder or the file; a file that ends in .npy says its own dtype.
        dtype: of the ids in other files.
        vocabulary: ids are below it. None: the largest id + 1, for which every rank reads all files
            once at the start.
        context: ids of a sequence.
        test_share: share of the ids at the end of a single file to test on.

    Raises:
        ValueError: an argument out of range, or files are missing, of another form or unreadable.
    """
    checks.one_of("data.dtype", dtype, DTYPES)
    root = existing(path, LAYOUT)
    if root.is_dir():
        train, test = (_mapped(file, dtype) for file in _parts(root))
    else:
        train, test = split(_mapped(root, dtype), test_share)
    return Windows(
        train,
        test,
        context=context,
        vocabulary=_checked(vocabulary, train, test),
        device=device,
        source=f"{len(train) + len(test):,} tokens of {root}",
    )


def _parts(root: Path) -> tuple[Path, Path]:
    """Return the files to train and to test on."""
    train = root / "train.bin"
    test = next((root / f"{n}.bin" for n in ("val", "test") if (root / f"{n}.bin").is_file()), None)
    if test is None or not train.is_file():
        raise ValueError(f"data.path={root}: lacks files; {LAYOUT}")
    return train, test


def _mapped(file: Path, dtype: str) -> np.ndarray:
    """Map the ids of a file, [ids]."""
    if file.suffix == ".npy":
        with reading(file):
            ids = np.asarray(np.load(file, mmap_mode="r", allow_pickle=False))
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise ValueError(
                f"data.path={file}: holds {ids.dtype} {list(ids.shape)}; must be integers [ids]"
            )
        return ids
    size, width = file.stat().st_size, np.dtype(dtype).itemsize
    if not size or size % width:
        raise ValueError(
            f"data.path={file}: its {size} bytes are not ids of data.dtype={dtype}, of {width} "
            f"byte{'s' * (width > 1)} each"
        )
    with reading(file):
        return np.asarray(np.memmap(file, dtype=dtype, mode="r"))


def _checked(vocabulary: object, train: np.ndarray, test: np.ndarray) -> int:
    """Return the size of the vocabulary."""
    if vocabulary is None:
        return int(max(ids.max(initial=0) for ids in (train, test))) + 1
    return checks.whole("data.vocabulary", vocabulary, 1)
