"""Files that are whole or absent, and what killed writers leave."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from lab.settings.storage import lock, open_lock, write_atomically

KILLED = """
import os, signal, sys
from pathlib import Path
from lab.settings.storage import write_atomically

def write(path):
    path.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)

write_atomically(Path(sys.argv[1]), write)
"""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_next_writer_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    path = tmp_path / "figure.svg"
    subprocess.run([sys.executable, "-c", KILLED, path], check=False)
    (left,) = names(tmp_path)
    assert left != path.name
    write_atomically(path, lambda temporary: temporary.write_text("whole"))
    assert names(tmp_path) == [path.name]
    assert path.read_text() == "whole"


def test_files_of_others_stay(tmp_path: Path) -> None:
    host = socket.gethostname().replace(".", "-")
    others = [
        f".figure.svg.{host}-{os.getppid()}",  # still writing
        f".figure.svg.{host}-notes",
        f".figure.svg.{host}x-1",
        f".another.svg.{host}-{2**40}",
    ]
    for name in others:
        (tmp_path / name).touch()
    write_atomically(tmp_path / "figure.svg", lambda temporary: temporary.write_text("whole"))
    assert names(tmp_path) == sorted([*others, "figure.svg"])


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        write_atomically(tmp_path / "nowhere" / "a", lambda temporary: temporary.write_text(""))


def test_a_full_disk_names_the_file_which_stays_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("old")

    def write(temporary: Path) -> None:
        temporary.write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left on device: .*table.csv'"):
        write_atomically(path, write)
    assert (names(tmp_path), path.read_text()) == (["table.csv"], "old")


def test_a_lock_is_waited_for_and_not_asked_of_a_file_system_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep on such a file system ended with a traceback."""
    with open_lock(tmp_path / ".lock") as first, open_lock(tmp_path / ".lock") as second:
        assert lock(first, 0.0)
        assert not lock(second, 0.0)

        def refused(*_: object) -> None:
            raise OSError(errno.ENOLCK, "No locks available")

        monkeypatch.setattr(fcntl, "flock", refused)
        assert lock(second, 0.0)
