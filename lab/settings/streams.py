"""Standard streams that are closed, full, or read by nobody: no traceback, and no run is lost.

On them, names of others are shown without what would control a terminal, or turn text around.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import IO, Any, TypeVar

from lab.settings.errors import OutputLost

# Halves of surrogate pairs too, which JSON may hold and no file can.
CONTROL = re.compile(
    r"[\ud800-\udfff\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)

T = TypeVar("T")


class Output:
    """Standard output whose failures can be told from those of files."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with _told():
            try:
                return self._stream.write(text)
            except UnicodeEncodeError as error:  # a stream of ASCII, as cron's are
                coding = error.encoding
                return self._stream.write(text.encode(coding, "backslashreplace").decode(coding))

    def flush(self) -> None:
        with _told():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class BestEffortStream(Output):
    """A stream whose failures are no reason to end anything."""

    def write(self, text: str) -> int:
        with suppress(OSError):
            return super().write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            super().flush()


@contextmanager
def safe_streams() -> Iterator[None]:
    """Write to whatever the standard streams are, while the context lasts."""
    _open_closed()
    out: Any = Output(sys.stdout)
    messages: Any = BestEffortStream(sys.stderr)
    with redirect_stdout(out), redirect_stderr(messages):
        yield


@contextmanager
def output_as_messages() -> Iterator[None]:
    """Let a run go on without standard output, if that fails, while the context lasts."""
    before = sys.stdout
    messages: Any = BestEffortStream(before)
    try:
        with redirect_stdout(messages):
            yield
    finally:
        try:
            before.flush()
        except OSError:
            drop_output()


def drop_output() -> None:
    """Let what is still to be written vanish, so that Python does not complain at its end."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _open_closed() -> None:
    """Open closed streams to nowhere: a file that got their numbers would be written into."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            if nowhere != number and not _is_open(number):
                os.dup2(nowhere, number)
            setattr(sys, name, os.fdopen(nowhere, "w"))


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except (BrokenPipeError, OutputLost):  # whoever reads has enough, which is no failure
        raise
    except OSError as error:
        raise OutputLost(f"standard output: {error.strerror}") from None


def escape_controls(text: str) -> str:
    """Write characters that control a terminal, or the direction of text, as escapes."""
    return CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class EscapedOutput(Output):
    """Standard output that shows controls instead of passing them on."""

    def write(self, text: str) -> int:
        return super().write(escape_controls(text))


@contextmanager
def visible_output() -> Iterator[None]:
    """Show controls on standard output while the context lasts."""
    with redirect_stdout(EscapedOutput(sys.stdout)):  # pyright: ignore[reportArgumentType]
        yield


def progress(
    items: Iterable[T], unit: str, shows: bool = True, total: int | None = None
) -> Iterable[T]:
    """Iterate with a progress bar on standard error, drawn rarely if that is no terminal.

    Args: unit: what one item is called. total: how many there are, if `items` does not say.
    """
    from tqdm import tqdm  # imported here, as help shows none

    every_s = 0.5 if sys.stderr.isatty() else 10
    return tqdm(items, total=total, disable=not shows, mininterval=every_s, unit=unit, delay=1)
