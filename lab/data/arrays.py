"""Inputs and targets from any file of numbers: npz, npy or parquet."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lab.data import TensorData, existing, held_out, reading
from lab.settings import checks

LAYOUT = "give an .npz file, a folder of .npy files, or a .parquet table"
SPLIT = ("x_train", "y_train", "x_test", "y_test")  # as Keras names the arrays of its data sets
INTEGERS = "biu"  # kinds of numpy dtypes
MOST_CLASSES = 10**7  # more are no indices, but numbers

Part = tuple[np.ndarray, np.ndarray]  # inputs and targets


def arrays(
    *,
    seed: int,
    device: torch.device,
    path: str | None = None,
    inputs: str | Sequence[str] | None = None,
    targets: str | None = None,
    vocabulary: int | None = None,
    test_share: float = 0.1,
) -> TensorData:
    """Return the samples of a file, along the first dimension of its arrays, held on the device.

    Values are neither scaled nor reshaped. Inputs become float32. Targets that are integers become
    class indices, int64, of as many classes as the largest says; others become float32.

    Args:
        path: an .npz file, a folder of .npy files, or a .parquet table.
        inputs: name of the array (None: "inputs"), or of columns of the table (None: all others).
        targets: name of the array or column (None: "targets").
        vocabulary: inputs are token ids below it, and become int64; None: they are numbers.
        test_share: share of the samples, drawn at random, to test on. Not used if there are arrays
            x_train, y_train, x_test and y_test, which are taken unless others are named.
    """
    root, share = existing(path, LAYOUT), held_out(test_share)
    train, test = parts = _parts(root, inputs, targets, share)
    for part in parts:
        _check(root, part, vocabulary)
    indices = all(answers.dtype.kind in INTEGERS for _, answers in parts)
    num_classes = 1 + max(int(answers.max()) for _, answers in parts) if indices else None
    of_inputs = np.int64 if vocabulary else np.float32
    dtypes = of_inputs, np.int64 if indices else np.float32
    return TensorData(
        _placed(train, dtypes, device),
        _placed(test, dtypes, device),
        unit="sample",
        num_classes=num_classes,
        vocabulary=vocabulary,
    )


def _parts(
    root: Path, inputs: str | Sequence[str] | None, targets: str | None, share: float
) -> tuple[Part, Part]:
    """Read the samples to train and to test on."""
    if root.suffix == ".parquet":
        return _split(root, read_columns(root, inputs, targets or "targets"), share)
    found = _read(root)
    if inputs is None and targets is None and found.keys() >= set(SPLIT):
        x_train, y_train, x_test, y_test = (found[name] for name in SPLIT)
        return (x_train, y_train), (x_test, y_test)
    names = {"inputs": str(inputs or "inputs"), "targets": targets or "targets"}
    for key, name in names.items():
        if name not in found:
            there = f"its arrays are {', '.join(found)}" if found else LAYOUT
            raise ValueError(f"data.{key}={name}: {root} has no such array; {there}")
    return _split(root, (found[names["inputs"]], found[names["targets"]]), share)


def _read(root: Path) -> dict[str, np.ndarray]:
    """Read all arrays of an .npz file, or of a folder of .npy files, by name."""
    if root.suffix == ".npz":
        # Of a damaged file, numpy would leave its own handle open.
        with (
            reading(root),
            root.open("rb") as content,
            np.load(content, allow_pickle=False) as file,
        ):
            return dict(file)
    if not root.is_dir():
        raise ValueError(f"data.path={root} is not in a supported format; {LAYOUT}")
    return {file.stem: _npy(file) for file in sorted(root.glob("*.npy"))}


def _npy(file: Path) -> np.ndarray:
    with reading(file):
        return np.load(file, allow_pickle=False)


def _split(root: Path, whole: Part, share: float) -> tuple[Part, Part]:
    """Draw the samples to test on, the same ones in every run."""
    inputs, targets = whole
    _check_shapes(root, whole)
    order = np.random.default_rng(0).permutation(len(inputs))
    test, train = np.split(order, [round(share * len(order))])
    return (inputs[train], targets[train]), (inputs[test], targets[test])


def _check(root: Path, part: Part, vocabulary: int | None) -> None:
    """Refuse arrays that no model can learn from, or that contradict each other."""
    _check_shapes(root, part)
    inputs, targets = part
    for name, array in (("inputs", inputs), ("targets", targets)):
        if array.dtype.kind not in INTEGERS + "f":
            raise ValueError(
                f"data.path={root}: {name} have type {array.dtype}; they must be numbers"
            )
        if not np.isfinite(array).all():
            raise ValueError(f"data.path={root}: {name} are not all finite")
        if array.dtype == np.float64 and np.abs(array).max() > np.finfo(np.float32).max:
            raise ValueError(f"data.path={root}: {name} are beyond the range of float32")
    if targets.dtype.kind in INTEGERS and targets.min() < 0:
        raise ValueError(
            f"data.path={root}: the smallest target is the integer {targets.min()}; class indices "
            "must be at least 0, and numbers to predict must be floating-point"
        )
    if targets.dtype.kind in INTEGERS and targets.max() >= MOST_CLASSES:
        raise ValueError(
            f"data.path={root}: the largest target is the integer {targets.max()}; class indices "
            f"must be below {MOST_CLASSES:,}, and numbers to predict must be floating-point"
        )
    if vocabulary is not None:
        _check_ids(root, inputs, vocabulary)


def _check_shapes(root: Path, part: Part) -> None:
    inputs, targets = part
    is_empty = not inputs.size or not targets.size
    if min(inputs.ndim - 1, targets.ndim) < 1 or is_empty or len(inputs) != len(targets):
        raise ValueError(
            f"data.path={root}: inputs have shape {list(inputs.shape)} and targets "
            f"{list(targets.shape)}; both must be [samples, ...] with the same number of samples, "
            "at least one in each part"
        )


def _check_ids(root: Path, inputs: np.ndarray, vocabulary: object) -> None:
    vocabulary = checks.integer("data.vocabulary", vocabulary, 1)
    smallest, largest = inputs.min(), inputs.max()
    if inputs.dtype.kind not in "iu" or smallest < 0 or largest >= vocabulary:
        raise ValueError(
            f"data.vocabulary={vocabulary}: inputs in {root} are {inputs.dtype} from {smallest} to "
            f"{largest}; token ids must be integers from 0 to {vocabulary - 1}"
        )


def _placed(part: Part, dtypes: tuple[type, type], device: torch.device) -> tuple[Tensor, Tensor]:
    inputs, targets = (
        torch.from_numpy(array.astype(dtype)).to(device)
        for array, dtype in zip(part, dtypes, strict=True)
    )
    return inputs, targets


def read_columns(
    file: Path, inputs: str | Sequence[str] | None, target: str
) -> tuple[np.ndarray, np.ndarray]:
    """Read inputs [rows, columns] and targets [rows] of a table.

    Args:
        inputs: names of columns; None: all but the target.
        target: name of a column.

    Raises:
        ValueError: the file is no such table, lacks a column or a value, or holds other than
            numbers.
    """
    import pyarrow.parquet as parquet  # slow to import

    with reading(file):
        there, num_rows = [*parquet.read_schema(file).names], parquet.read_metadata(file).num_rows
    listed = [inputs] if isinstance(inputs, str) else [*checks.listed("data.inputs", inputs or ())]
    listed = listed or [name for name in there if name != target]
    for name in {name for name in listed if listed.count(name) > 1 or name == target}:
        raise ValueError(
            f"data.inputs={name}: {file}: the column is named twice, or is also the target"
        )
    for key, name in [*(("inputs", name) for name in listed), ("targets", target)]:
        if name not in there:
            raise ValueError(
                f"data.{key}={name}: {file} has no such column; its columns are {', '.join(there)}"
            )
    _require_memory(file, num_rows, len(listed) + 1)
    with reading(file):
        table = parquet.read_table(file, columns=[*listed, target])
    values = {name: _numbers(file, name, table[name]) for name in table.column_names}
    return np.stack([values[name] for name in listed], axis=1), values[target]


def _require_memory(file: Path, rows: int, columns: int) -> None:
    """Refuse a table that does not fit: equal rows may take megabytes in a file, and much here."""
    needed, there = 8 * rows * columns, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > there / 2:
        raise ValueError(
            f"data.path={file}: {rows:,} rows of {columns} columns need {needed / 2**30:.0f} GiB; "
            f"at most half of this machine's {there / 2**30:.0f} GiB may be used"
        )


def _numbers(file: Path, name: str, column: Any) -> np.ndarray:
    """Return the values of a column (pyarrow.ChunkedArray), [rows]."""
    if missing := column.null_count:
        values = f"missing value{'s' if missing > 1 else ''}"
        raise ValueError(f"data.path={file}: column {name} has {missing} {values}")
    values = column.to_numpy()
    if values.dtype.kind not in "biuf":
        raise ValueError(
            f"data.path={file}: column {name} has type {column.type}, not numbers; name the "
            "columns to learn from in data.inputs"
        )
    return values
