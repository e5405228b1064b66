"""Windows of token ids: of text, as bytes, and of files of ids."""

from __future__ import annotations

import pickle
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lab.data import GlobalSampler
from lab.data.tokens import Windows, text, tokens
from tests.support import refusing

CPU = torch.device("cpu")


def make(of: Callable[..., Windows], path: Path | str | None, **arguments: Any) -> Windows:
    return of(seed=0, device=CPU, path=None if path is None else str(path), **arguments)


def in_order(data: Windows) -> tuple[Tensor, Tensor]:
    """Return the inputs and targets of one epoch, sorted by the first id of a window."""
    every = GlobalSampler(data.num_train, data.num_train, 0, 1, seed=0)
    inputs, targets = next(data.train_batches(every))
    order = inputs[:, 0].argsort()
    return inputs[order], targets[order]


def words(data: Windows) -> bytes:
    """Return the text that the windows train on, but for its first byte."""
    return bytes(torch.cat([part.flatten() for part in in_order(data)[1]]).tolist())


def test_windows_follow_each_other_and_targets_are_the_next_ids(tmp_path: Path) -> None:
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "ids.bin")
    data = make(tokens, tmp_path / "ids.bin", context=8, test_share=0.25)
    inputs, targets = in_order(data)
    assert (data.num_train, data.num_test) == (9, 3)  # of 75 and 25 ids
    assert torch.equal(inputs.flatten(), torch.arange(72))
    assert torch.equal(targets, inputs + 1)
    ((inputs, targets),) = data.test_batches(0, 1, 3)
    assert torch.equal(inputs.flatten(), torch.arange(75, 99))
    assert torch.equal(targets, inputs + 1)
    assert inputs.is_contiguous() and targets.is_contiguous()


def test_a_model_may_be_told_the_vocabulary(tmp_path: Path) -> None:
    np.array([5, 1, 2, 3] * 10, dtype=np.uint16).tofile(tmp_path / "ids.bin")
    own, set_ = (
        make(tokens, tmp_path / "ids.bin", context=2, **more) for more in ({}, {"vocabulary": 50})
    )
    assert (own.vocabulary, own.num_classes) == (6, 6)
    assert (set_.vocabulary, set_.num_classes) == (50, 50)
    assert (own.unit, own.input_shape, own.input_dtype) == ("sequence", (2,), torch.int64)
    assert own.source == f"40 tokens of {tmp_path}/ids.bin"


def test_the_default_text_is_the_standard_library_of_this_python() -> None:
    data = make(text, None)
    library = Path(sysconfig.get_paths()["stdlib"])
    size, unit, rest = data.source.split(" ", 2)
    num_bytes = int(size.replace(",", ""))
    assert num_bytes > 1_000_000 and unit == "bytes" and rest.endswith(f", {library}")
    assert data.vocabulary == 256
    assert data.num_train + data.num_test == pytest.approx(num_bytes / 128, abs=2)
    first = min(f.name for f in library.glob("*.py"))
    assert bytes(data._train[:64]) == (library / first).read_bytes()[:64]


def test_a_folder_is_read_in_the_order_of_its_paths_without_hidden_files(tmp_path: Path) -> None:
    content = {"b.txt": b"EFGH", "a/z.txt": b"ABCD", "c.md": b"IJKL", ".git/x.txt": b"----"}
    for name, part in content.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(part)
    assert words(make(text, tmp_path, context=1, test_share=0.2)) == b"BCDEFGHIJ"
    of_suffix = make(text, tmp_path, context=1, test_share=0.3, suffix=".txt")
    assert words(of_suffix) == b"BCDEF"
    assert of_suffix.source == f"8 bytes of 2 files, {tmp_path}"
    assert words(make(text, tmp_path / "b.txt", context=1, test_share=0.5)) == b"F"


def test_a_folder_of_nanogpt_has_its_parts_and_no_pickle_is_opened(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Callable[..., None], tuple[()]]:
            return pytest.fail, ()

    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(Bomb()))
    np.arange(50, dtype=np.uint16).tofile(tmp_path / "train.bin")
    np.arange(200, 220, dtype=np.uint16).tofile(tmp_path / "val.bin")
    data = make(tokens, tmp_path, context=4)
    assert (data.num_train, data.num_test, data.vocabulary) == (12, 4, 220)
    (tmp_path / "val.bin").rename(tmp_path / "test.bin")
    assert make(tokens, tmp_path, context=4).num_test == 4


@pytest.mark.parametrize("dtype", ["uint8", "uint32", "int32", "int64"])
def test_ids_may_be_of_other_types(tmp_path: Path, dtype: str) -> None:
    np.arange(60, dtype=dtype).tofile(tmp_path / "ids.bin")
    np.save(tmp_path / "ids.npy", np.arange(60, dtype=dtype))
    from_bin = make(tokens, tmp_path / "ids.bin", context=5, dtype=dtype)
    from_npy = make(tokens, tmp_path / "ids.npy", context=5)
    for data in (from_bin, from_npy):
        assert torch.equal(in_order(data)[0].flatten(), torch.arange(50))


def test_files_are_mapped_and_not_read(tmp_path: Path) -> None:
    with (tmp_path / "huge.bin").open("wb") as file:
        file.truncate(2**36)  # a hole: it takes no place on the disk
    data = make(tokens, tmp_path / "huge.bin", vocabulary=10)
    assert data.num_train + data.num_test == pytest.approx(2**35 / 128, abs=2)
    assert next(make(text, tmp_path / "huge.bin").test_batches(0, 1, 2))[0].shape == (2, 128)


@pytest.mark.parametrize("wrong", [50, -1])
def test_an_id_beyond_the_vocabulary_is_found_in_the_batch_that_holds_it(
    tmp_path: Path, wrong: int
) -> None:
    ids = np.zeros(20_000, dtype=np.int32)
    ids[2] = wrong  # in a window that is not among the first and the checked ones
    ids.tofile(tmp_path / "ids.bin")
    data = make(tokens, tmp_path / "ids.bin", context=1, dtype="int32", vocabulary=50)
    data.targets()
    every = GlobalSampler(data.num_train, data.num_train, 0, 1, seed=0)
    source = f"20,000 tokens of {tmp_path}/ids.bin"
    with refusing(f"data.vocabulary=50: {source} contain the id {wrong}; ids must be from 0 to"):
        next(data.train_batches(every))


def test_batches_for_a_gpu_are_copied_from_pinned_memory_a_step_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "ids.bin")
    data = tokens(seed=0, device=torch.device("meta"), path=str(tmp_path / "ids.bin"), context=4)
    pinned: list[int] = []
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: pinned.append(self.numel()) or self)
    batches = data.train_batches(GlobalSampler(data.num_train, 3, 0, 1, seed=0))
    for steps_begun in (1, 2):
        inputs, _ = next(batches)
        assert inputs.device.type == "meta"
        assert pinned == [15] * (steps_begun + 1)


@pytest.mark.parametrize(
    ("of", "file", "arguments", "message"),
    [
        (text, "a.txt", {"context": 0}, "data.context=0: must be an integer of at least 1"),
        (text, "a.txt", {"context": 8}, "data.context=8: only 8 tokens to train on; a"),
        (text, "a.txt", {"context": 2}, "data.context=2: only 1 token to test on; a"),
        (text, "a.txt", {"test_share": 1}, "data.test_share=1: must be a number above 0 and bel"),
        (text, "none", {}, "data.path={}/none: no such file or folder; give a file or a folder"),
        (text, "empty.txt", {}, "data.path={}/empty.txt contains no text: all files are empty"),
        (text, "", {"suffix": 3}, "data.path={} contains no text: no files, with data.suffix=3"),
        (text, "", {"suffix": ".md"}, "data.path={} contains no text: no files"),
        (tokens, None, {}, "data.path is not set; give a folder with train.bin and val.bin"),
        (tokens, "", {}, "data.path={} has no files to train and test on; give"),
        (tokens, "a.txt", {"dtype": "f4"}, "data.dtype=f4: allowed: uint8, uint16, uint32"),
        (tokens, "a.txt", {"dtype": "int64"}, "data.path={}/a.txt: its 9 bytes cannot be divided"),
        (tokens, "empty.txt", {}, "data.path={}/empty.txt: its 0 bytes cannot be divided"),
        (tokens, "whole.npy", {"vocabulary": 0}, "data.vocabulary=0: must be an integer"),
        (tokens, "real.npy", {}, "data.path={}/real.npy: contains float64 of shape [9]"),
        (tokens, "bad.npy", {}, "data.path={}/bad.npy: cannot be read: "),
    ],
)
def test_refuses_in_one_line(
    tmp_path: Path,
    of: Callable[..., Windows],
    file: str | None,
    arguments: dict[str, Any],
    message: str,
) -> None:
    (tmp_path / "a.txt").write_bytes(b"123456789")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "bad.npy").write_bytes(b"no array")
    np.save(tmp_path / "real.npy", np.zeros(9))
    np.save(tmp_path / "whole.npy", np.zeros(9, dtype=np.int64))
    with refusing(message.format(tmp_path)):
        make(of, None if file is None else tmp_path / file, **arguments)
