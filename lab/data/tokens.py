"""Sequences of token ids: of files that are mapped, not read, of any tokeniser; the bytes of texts.

A sequence is a window of two long arrays of ids, one to train and one to test on.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lab.data import GlobalSampler, existing, held_out, rank_batches, reading, to_device
from lab.settings import checks

NUM_BYTES = 256
# Of the standard library; packages are not part of it, and its tests are missing on some systems.
LEFT_OUT = ("site-packages", "dist-packages", "test", "tests")
DTYPES = ("uint8", "uint16", "uint32", "int32", "int64")
LAYOUT = "give a folder with train.bin and val.bin (or test.bin), or one file"
NUM_CHECKED = 64  # windows of each part whose targets a task sees before the first step


class Windows:
    """Windows of `context` ids, each with the ids that follow them one position later as targets.

    Windows follow each other without overlap, so every id but the first is predicted once in an
    epoch; what is left at the end and shorter is not used. Arrays stay where they are, in memory or
    in a mapped file: a batch is gathered on the host and copied to the device a step early.

    Args:
        train, test: token ids, of any integer type, [ids].
        context: ids of a window.
        vocabulary: ids are below it.
        device: where batches go.
        source: see lab.data.Data.

    Raises:
        ValueError: `context` is not an integer of at least 1, or a part is shorter than a window.
    """

    def __init__(
        self,
        train: np.ndarray,
        test: np.ndarray,
        *,
        context: int,
        vocabulary: int,
        device: torch.device,
        source: str,
    ) -> None:
        checks.integer("data.context", context, 1)
        for part, ids in (("train", train), ("test", test)):
            if len(ids) <= context:
                raise ValueError(
                    f"data.context={context}: only {len(ids)} token{'s' * (len(ids) != 1)} to "
                    f"{part} on; a window and the token after it need {context + 1}"
                )
        self._train, self._test, self._device = train, test, device
        self.num_train, self.num_test = ((len(ids) - 1) // context for ids in (train, test))
        self.unit, self.source = "sequence", source
        self.input_shape: tuple[int, ...] = (context,)
        self.input_dtype = torch.int64
        self.num_classes: int | None = vocabulary
        self.vocabulary: int | None = vocabulary
        self._offsets = np.arange(context + 1)

    def targets(self) -> tuple[Tensor, Tensor]:
        """See lab.data.Data. Return those of at most 64 windows, evenly spaced, of each part."""
        return self._some(self._train, self.num_train), self._some(self._test, self.num_test)

    def train_batches(self, sampler: GlobalSampler) -> Iterator[tuple[Tensor, Tensor]]:
        """See lab.data.Data. ValueError: an id is not below the vocabulary."""
        windows = (self._gather(self._train, indices) for _, indices in sampler)
        placed = (to_device(batch, self._device) for batch in windows)
        for batch, _ in pairwise(placed):
            yield _shifted(batch)

    def test_batches(
        self, rank: int, world_size: int, batch_size: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """See lab.data.Data. ValueError: an id is not below the vocabulary."""
        for own in rank_batches(self.num_test, rank, world_size, batch_size):
            yield _shifted(to_device(self._gather(self._test, np.array(own)), self._device))

    def _some(self, ids: np.ndarray, num_windows: int) -> Tensor:
        indices = np.linspace(0, num_windows - 1, min(num_windows, NUM_CHECKED)).astype(np.int64)
        return torch.from_numpy(self._gather(ids, indices)[:, 1:])

    def _gather(self, ids: np.ndarray, indices: np.ndarray) -> np.ndarray:
        """Return windows and the id after each, int64 [windows, context + 1]."""
        begins = indices[:, None] * self.input_shape[0]
        windows = ids[begins + self._offsets].astype(np.int64)
        # An embedding on a GPU would end the process, without a word of the data.
        smallest, largest = windows.min(), windows.max()
        if smallest < 0 or largest >= (self.vocabulary or 0):
            wrong = largest if smallest >= 0 else smallest
            raise ValueError(
                f"data.vocabulary={self.vocabulary}: {self.source} contain the id {wrong}; ids "
                "must be from 0 to vocabulary - 1 (is data.dtype the type of the file?)"
            )
        return windows


def _shifted(batch: Tensor) -> tuple[Tensor, Tensor]:
    """Split windows [batch, context + 1] into inputs and targets, each [batch, context]."""
    return batch[:, :-1].contiguous(), batch[:, 1:].contiguous()


def split(ids: np.ndarray, test_share: object) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids to train on, and the last `test_share` of them to test on.

    Raises:
        ValueError: `test_share` is not a number between 0 and 1.
    """
    num_test = round(len(ids) * held_out(test_share))
    return ids[: len(ids) - num_test], ids[len(ids) - num_test :]


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
        path: the folder or the file; a file that ends in .npy says its own dtype.
        dtype: of the ids in other files.
        vocabulary: ids are below it. None: the largest id + 1, for which every rank reads all files
            once at the start.
        context: ids of a sequence.
        test_share: share of the ids at the end of a single file to test on.
    """
    checks.one_of("data.dtype", dtype, DTYPES)
    root = existing(path, LAYOUT)
    if root.is_dir():
        train, test = (_mapped(file, dtype) for file in _parts(root))
    else:
        train, test = split(_mapped(root, dtype), test_share)
    if vocabulary is None:
        vocabulary = 1 + int(max(ids.max(initial=0) for ids in (train, test)))
    return Windows(
        *(train, test),
        context=context,
        vocabulary=checks.integer("data.vocabulary", vocabulary, 1),
        device=device,
        source=f"{len(train) + len(test):,} tokens of {root}",
    )


def _parts(root: Path) -> tuple[Path, Path]:
    """Return the files to train and to test on."""
    train = root / "train.bin"
    test = next((root / f"{n}.bin" for n in ("val", "test") if (root / f"{n}.bin").is_file()), None)
    if test is None or not train.is_file():
        raise ValueError(f"data.path={root} has no files to train and test on; {LAYOUT}")
    return train, test


def _mapped(file: Path, dtype: str) -> np.ndarray:
    """Map the ids of a file, [ids]."""
    if file.suffix == ".npy":
        with reading(file):
            ids = np.asarray(np.load(file, mmap_mode="r", allow_pickle=False))
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise ValueError(
                f"data.path={file}: contains {ids.dtype} of shape {list(ids.shape)}; it "
                "must contain integers of shape [ids]"
            )
        return ids
    size, width = file.stat().st_size, np.dtype(dtype).itemsize
    if not size or size % width:
        raise ValueError(
            f"data.path={file}: its {size} byte{'s' * (size != 1)} cannot be divided into ids of "
            f"data.dtype={dtype}, of {width} byte{'s' * (width > 1)} each"
        )
    with reading(file):
        return np.asarray(np.memmap(file, dtype=dtype, mode="r"))


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
        path: a file or a folder. None: the .py files of Python's own standard library, as far as
            this machine has them, without its tests.
        suffix: end of the names of the files to read in a folder, such as ".txt"; None: all.
        context: bytes of a sequence.
        test_share: share of the bytes at the end to test on.
    """
    if path:
        root = existing(path, "give a file or a folder")
        files = [root] if root.is_file() else _below(root, str(suffix or ""))
    else:
        root = Path(sysconfig.get_paths()["stdlib"])
        files = _below(root, str(suffix or ".py"), LEFT_OUT)
    ids = _bytes_of(files)
    if not len(ids):
        reason = "all files are empty" if files else f"no files, with data.suffix={suffix}"
        raise ValueError(f"data.path={root} contains no text: {reason}")
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
    content = list[bytes]()
    for file in files:
        with reading(file):
            content.append(file.read_bytes())
    return np.frombuffer(b"".join(content), dtype=np.uint8)
