"""Arrays of a user's file: npz, npy and parquet."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

from lab.data import TensorData
from lab.data.arrays import arrays
from tests.support import refusing

CPU = torch.device("cpu")
INPUTS = np.arange(40, dtype=np.int64).reshape(20, 2)
CLASSES = np.arange(20, dtype=np.uint8) % 5
REAL = INPUTS.sum(axis=1) / 2


def make(path: Path | None, **arguments: Any) -> TensorData:
    return arrays(seed=0, device=CPU, path=None if path is None else str(path), **arguments)


def whole(data: TensorData) -> tuple[Tensor, Tensor]:
    """Return all samples, those to train on first."""
    (inputs, test), targets = (part[0] for part in (data._train, data._test)), data.targets()
    return torch.cat([inputs, test]), torch.cat(targets)


def assert_paired(data: TensorData) -> None:
    """Check that every sample of INPUTS is there once, with a target that was made of it."""
    inputs, targets = whole(data)
    order = inputs[:, 0].argsort()
    assert torch.equal(inputs[order], torch.from_numpy(INPUTS).float())
    expected = REAL if data.num_classes is None else CLASSES
    assert torch.equal(targets[order], torch.from_numpy(expected).to(targets.dtype))


@pytest.mark.parametrize("kind", ["npz", "npy", "parquet"])
def test_integer_targets_are_classes_and_others_numbers(tmp_path: Path, kind: str) -> None:
    for name, targets in (("classes", CLASSES), ("real", REAL)):
        if kind == "npz":
            path = tmp_path / f"{name}.npz"
            np.savez(path, inputs=INPUTS, targets=targets)
        elif kind == "npy":
            path = tmp_path / name
            path.mkdir()
            np.save(path / "inputs.npy", INPUTS)
            np.save(path / "targets.npy", targets)
        else:
            path = tmp_path / f"{name}.parquet"
            columns = {"a": INPUTS[:, 0], "targets": targets, "b": INPUTS[:, 1].astype(np.float32)}
            pd.DataFrame(columns).to_parquet(path)
        data = make(path)
        assert_paired(data)
        assert data.num_classes == (5 if name == "classes" else None)
        assert data.targets()[0].dtype == (torch.int64 if name == "classes" else torch.float32)
        assert (data.num_train, data.num_test, data.unit) == (18, 2, "sample")
        assert (data.input_shape, data.input_dtype) == ((2,), torch.float32)


def test_the_samples_to_test_on_are_drawn_and_the_same_for_every_seed(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", inputs=INPUTS, targets=REAL)
    first, again = (
        arrays(seed=seed, device=CPU, path=str(tmp_path / "a.npz"), test_share=0.5)
        for seed in (0, 1)
    )
    held_out = first.targets()[1]
    assert torch.equal(held_out, again.targets()[1])
    assert not torch.equal(held_out.sort().values, torch.from_numpy(REAL[10:]).float())


def test_arrays_of_keras_are_split_already(tmp_path: Path) -> None:
    parts = {"x_train": INPUTS[:15], "y_train": CLASSES[:15]}
    parts |= {"x_test": INPUTS[15:], "y_test": CLASSES[15:]}
    np.savez(tmp_path / "mnist.npz", **parts)
    data = make(tmp_path / "mnist.npz")
    assert (data.num_train, data.num_test, data.num_classes) == (15, 5, 5)
    assert_paired(data)
    named = make(tmp_path / "mnist.npz", inputs="x_train", targets="y_train", test_share=0.2)
    assert (named.num_train, named.num_test) == (12, 3)


def test_columns_of_a_table_can_be_chosen(tmp_path: Path) -> None:
    columns = {"a": INPUTS[:, 0], "name": ["x"] * 20, "b": INPUTS[:, 1], "price": REAL}
    pd.DataFrame(columns).to_parquet(tmp_path / "a.parquet")
    assert_paired(make(tmp_path / "a.parquet", inputs=["a", "b"], targets="price"))
    assert make(tmp_path / "a.parquet", inputs="b", targets="price").input_shape == (1,)


def test_inputs_below_a_vocabulary_stay_integers(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", inputs=INPUTS.astype(np.int16), targets=CLASSES)
    data = make(tmp_path / "a.npz", vocabulary=40)
    assert (data.input_dtype, data.vocabulary, data.num_classes) == (torch.int64, 40, 5)
    assert torch.equal(whole(data)[0].sort(dim=0).values, torch.from_numpy(INPUTS))


FILES: dict[str, dict[str, Any]] = {
    "good.npz": {"inputs": INPUTS, "targets": CLASSES},
    "fewer.npz": {"inputs": INPUTS, "targets": CLASSES[1:]},
    "flat.npz": {"inputs": REAL, "targets": CLASSES},
    "nan.npz": {"inputs": INPUTS, "targets": np.full(20, np.nan)},
    "negative.npz": {"inputs": INPUTS, "targets": CLASSES.astype(int) - 1},
    "huge.npz": {"inputs": INPUTS, "targets": CLASSES.astype(int) + 2**40},
    "far.npz": {"inputs": np.full((20, 2), 1e300), "targets": CLASSES},
    "words.npz": {"inputs": INPUTS, "targets": np.array(["a"] * 20)},
    "objects.npz": {"inputs": INPUTS, "targets": np.array([{}] * 20, dtype=object)},
    "hollow.npz": {"inputs": INPUTS, "targets": np.zeros((20, 0))},
    "unlike.npz": {
        "x_train": INPUTS,
        "y_train": CLASSES,
        "x_test": REAL[:, None],
        "y_test": CLASSES,
    },
    "hole.parquet": {"a": [1.0, None], "targets": [0, 1]},
    "words.parquet": {"a": ["x", "y"], "targets": [0, 1]},
}


@pytest.mark.parametrize(
    ("file", "arguments", "message"),
    [
        (None, {}, "data.path is not set; give an .npz file, a folder of .npy files, or a .parq"),
        ("none.npz", {}, "data.path={}/none.npz: no such file or folder; give an .npz file, a"),
        ("broken.npz", {}, "data.path={}/broken.npz: cannot be read: "),
        ("broken.parquet", {}, "data.path={}/broken.parquet: cannot be read: "),
        ("a.csv", {}, "data.path={}/a.csv is not in a supported format; give an .npz file, "),
        ("", {}, "data.inputs=inputs: {} has no such array; give an .npz file, a folder of .npy"),
        ("good.npz", {"test_share": 0}, "data.test_share=0: must be a number above 0 and below"),
        ("good.npz", {"test_share": 0.01}, "data.path={}/good.npz: inputs have shape [0, 2]"),
        ("good.npz", {"targets": "y"}, "data.targets=y: {}/good.npz has no such array; its arrays"),
        ("good.npz", {"vocabulary": 39}, "data.vocabulary=39: inputs in {}/good.npz are int64 fr"),
        ("good.npz", {"vocabulary": 0}, "data.vocabulary=0: must be an integer of at least 1"),
        ("fewer.npz", {}, "data.path={}/fewer.npz: inputs have shape [20, 2] and targets [19]"),
        ("flat.npz", {}, "data.path={}/flat.npz: inputs have shape [20] and targets [20]"),
        (
            "hollow.npz",
            {},
            "data.path={}/hollow.npz: inputs have shape [20, 2] and targets [20, 0]",
        ),
        ("unlike.npz", {}, "data: inputs have shape [2] in the samples to train on, and [1] in"),
        ("nan.npz", {}, "data.path={}/nan.npz: targets are not all finite"),
        ("negative.npz", {}, "data.path={}/negative.npz: the smallest target is the integer -1"),
        ("huge.npz", {}, "data.path={}/huge.npz: the largest target is the integer 1099511627"),
        ("far.npz", {}, "data.path={}/far.npz: inputs are beyond the range of float32"),
        ("pipe.npz", {}, "data.path={}/pipe.npz: not a regular file"),
        ("words.npz", {}, "data.path={}/words.npz: targets have type <U1; they must be numbers"),
        ("objects.npz", {}, "data.path={}/objects.npz: cannot be read: Object arrays cannot be lo"),
        ("hole.parquet", {}, "data.path={}/hole.parquet: column a has 1 missing"),
        ("words.parquet", {}, "data.path={}/words.parquet: column a has type "),
        ("hole.parquet", {"targets": "b"}, "data.targets=b: {}/hole.parquet has no such column;"),
        ("hole.parquet", {"inputs": 3}, "data.inputs=3: must be a list"),
        ("hole.parquet", {"inputs": ["c"]}, "data.inputs=c: {}/hole.parquet has no such column; "),
    ],
)
def test_refuses_in_one_line(
    tmp_path: Path, file: str | None, arguments: dict[str, Any], message: str
) -> None:
    (tmp_path / "a.csv").touch()
    os.mkfifo(tmp_path / "pipe.npz")
    for broken in ("broken.npz", "broken.parquet"):
        (tmp_path / broken).write_bytes(b"neither")
    if file in FILES and file.endswith(".npz"):
        np.savez(tmp_path / file, **FILES[file])
    elif file in FILES:
        pd.DataFrame(FILES[file]).to_parquet(tmp_path / file)
    with refusing(message.format(tmp_path)):
        make(None if file is None else tmp_path / file, **arguments)
