"""Where the C++ codec keeps its build: in the user's cache, or else where nobody else can write."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from lab.codec.onebit import native

HERE = torch.backends.cpu.get_cpu_capability()


@pytest.fixture
def private(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Where a build goes if the user's cache cannot be written; root too cannot write in a file."""
    (tmp_path / "file").touch()
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    native.build.cache_clear()
    yield tmp_path / "tmp" / f"scaling-lab-{os.getuid()}"
    native.build.cache_clear()


def test_without_a_cache_a_private_temporary_folder_holds_the_build(private: Path) -> None:
    assert native.build(HERE) is not None
    assert [path.suffix for path in private.iterdir()] == [".so"]
    assert private.stat().st_mode & 0o777 == 0o700


def test_without_a_home_too(private: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    assert native._cache() == private


@pytest.mark.parametrize(
    "prepare",
    [
        lambda path: path.mkdir(mode=0o777) or path.chmod(0o777),
        lambda path: path.symlink_to(path.parent),
        lambda path: path.touch(),
    ],
    ids=["open to all", "link", "file"],
)
def test_a_folder_that_others_can_write_is_never_loaded_from(
    private: Path, prepare: Callable[[Path], None]
) -> None:
    prepare(private)
    with pytest.warns(UserWarning, match="plain torch is used"):
        assert native.build(HERE) is None


def test_ranks_of_a_host_warn_once(private: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with warnings.catch_warnings(action="error"):
        assert native.build(HERE) is None
    native.build.cache_clear()
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.warns(UserWarning, match="no-such-compiler") as caught:
        assert native.build(HERE) is None
    (line,) = warnings.formatwarning(
        caught[0].message, UserWarning, caught[0].filename, caught[0].lineno
    ).splitlines()
    assert line.startswith("lab.codec.onebit.native:")
