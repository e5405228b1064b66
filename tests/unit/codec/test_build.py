"""C++ sources are compiled at first use and cached where only the user can write."""

from __future__ import annotations

import os
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from lab.codec import build

HERE = torch.backends.cpu.get_cpu_capability()


@pytest.fixture(autouse=True)
def forgetful() -> Iterator[None]:
    """Let each test start as a process that has loaded nothing."""
    build.load.cache_clear()
    yield
    build.load.cache_clear()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Write a kernel that no codec of the lab has."""
    path = tmp_path / "mine" / "answer.cpp"
    path.parent.mkdir()
    path.write_text('extern "C" int answer() { return 42; }\n')
    return path


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return the user's cache folder, which is writable."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "scaling-lab"


@pytest.fixture
def private(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return the build folder if the user's cache is a file, in which not even root can write."""
    (tmp_path / "file").touch()
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return tmp_path / "tmp" / f"scaling-lab-{os.getuid()}"


def answer(source: Path) -> int:
    library = build.load(source, HERE)
    assert library is not None
    return library.answer()


def test_a_source_is_compiled_once(
    monkeypatch: pytest.MonkeyPatch, source: Path, cache: Path
) -> None:
    assert answer(source) == 42
    (library,) = cache.iterdir()
    assert library.name.startswith("mine-answer-") and library.suffix == ".so"
    build.load.cache_clear()
    monkeypatch.setattr(subprocess, "run", _no_compiler)
    assert answer(source) == 42


def _no_compiler(*_: object, **__: object) -> None:
    raise AssertionError("compiled again")


def test_a_changed_source_or_header_is_compiled_again(source: Path, cache: Path) -> None:
    assert answer(source) == 42
    source.write_text('#include "number.h"\nextern "C" int answer() { return NUMBER; }\n')
    for number in (43, 44):
        source.with_name("number.h").write_text(f"#define NUMBER {number}\n")
        build.load.cache_clear()
        assert answer(source) == number
    assert len([*cache.iterdir()]) == 3


def test_each_level_is_compiled_for_its_instructions(
    monkeypatch: pytest.MonkeyPatch, source: Path, cache: Path
) -> None:
    lines = []

    def fail(line: list[str], **_: object) -> None:
        lines.append(line)
        raise OSError("not today")

    monkeypatch.setattr(subprocess, "run", fail)
    for level in ("DEFAULT", "AVX2", "AVX512"):
        with pytest.warns(UserWarning, match="not today"):
            assert build.load(source, level) is None
    flags = [[word for word in line if word.startswith("-march")] for line in lines]
    assert flags == [[], ["-march=x86-64-v3"], ["-march=x86-64-v4"]]


@pytest.mark.usefixtures("cache")
def test_a_source_that_does_not_compile_is_reported_once_by_name(source: Path) -> None:
    source.write_text("no C++\n")
    with pytest.warns(UserWarning, match=r"^mine/answer\.cpp cannot be built \(.*error") as caught:
        assert build.load(source, HERE) is None
    assert len(caught) == 1 and "\n" not in str(caught[0].message)
    with warnings.catch_warnings(action="error"):
        assert build.load(source, HERE) is None


def homeless() -> Path:
    raise RuntimeError("Could not determine home directory.")


@pytest.mark.parametrize("lacks", ["cache", "home"])
def test_without_a_cache_a_private_temporary_folder_holds_the_build(
    private: Path, source: Path, monkeypatch: pytest.MonkeyPatch, lacks: str
) -> None:
    if lacks == "home":
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "home", homeless)
    assert answer(source) == 42
    assert [path.suffix for path in private.iterdir()] == [".so"]
    assert private.stat().st_mode & 0o777 == 0o700


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
    private: Path, source: Path, prepare: Callable[[Path], None]
) -> None:
    prepare(private)
    with pytest.warns(UserWarning, match="plain torch is used"):
        assert build.load(source, HERE) is None


@pytest.mark.usefixtures("private")
def test_ranks_of_a_host_warn_once(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with warnings.catch_warnings(action="error"):
        assert build.load(source, HERE) is None
    build.load.cache_clear()
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.warns(UserWarning, match="no-such-compiler") as caught:
        assert build.load(source, HERE) is None
    (line,) = warnings.formatwarning(
        caught[0].message, UserWarning, caught[0].filename, caught[0].lineno
    ).splitlines()
    assert line.startswith("lab.codec.build:")


@pytest.mark.parametrize("damage", ["content", "mode"])
def test_a_library_that_is_not_as_it_was_built_is_built_again(
    source: Path, cache: Path, damage: str
) -> None:
    assert answer(source) == 42
    (library,) = cache.iterdir()
    if damage == "content":
        library.unlink()  # and not written over, as it is in this process' memory
        library.write_bytes(b"another")
    else:
        library.chmod(0o777)
    build.load.cache_clear()
    assert answer(source) == 42
    assert library.stat().st_mode & 0o777 == 0o700


def test_a_cache_that_others_can_write_to_is_not_used(
    source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    cache.mkdir()
    cache.chmod(0o777)
    assert answer(source) == 42
    assert not any(cache.iterdir())
    (library,) = (tmp_path / f"scaling-lab-{os.getuid()}").iterdir()
    assert library.suffix == ".so"
