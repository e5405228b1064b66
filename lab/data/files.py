"""The file or folder of a data set."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lab.settings import checks


def existing(path: str | None, layout: str) -> Path:
    """Return the file or folder of `data.path`.

    Args: layout: a clause that says what to give.

    Raises:
        ValueError: it is not set, or there is no such file or folder.
    """
    if not path:
        raise ValueError(f"data.path is not set; {layout}")
    found = Path(str(path)).expanduser()
    if not found.exists():
        raise ValueError(f"data.path={path}: no such file or folder; {layout}")
    return found


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Turn any error of a reader of `file` into one line that names the file.

    Raises:
        ValueError: it cannot be read, or is no regular file.
    """
    if file.exists() and not file.is_file():  # of a pipe, a reader would wait for ever
        raise ValueError(f"data.path={file}: is no regular file")
    try:
        yield
    except Exception as error:  # readers raise many types: of zip, of Arrow, of the system
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise ValueError(f"data.path={file}: cannot be read: {reason}") from None


def held_out(test_share: object) -> float:
    """Return the share of the data to test on. ValueError: it is not a number between 0 and 1."""
    return checks.number("data.test_share", test_share, above=0, below=1)
