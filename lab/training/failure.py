"""The status, message and traceback that a record holds for an error."""

from __future__ import annotations

import sys

import torch

from lab.distributed.watchdog import Failure
from lab.settings.blame import blame
from lab.settings.secrets import without_secrets

# torch raises plain RuntimeErrors from its CPU allocator, Gloo's waits and Gloo's connections to a
# lost rank, so only their messages tell them apart.
OUT_OF_MEMORY = ("can't allocate memory",)
TIMEOUT = ("timed out", "timeout")
LOST_PEER = ("peer", "connection reset")
LONGEST = 10_000  # characters of an error's text


def failure_of(error: BaseException, rank: int) -> Failure:
    """Return the status and the one line that a record holds for an error on `rank`.

    If the user's code failed, the line names the place, and the traceback is there as well.
    """
    text = _first_line(error)
    line = f"rank {rank}: {type(error).__name__}: {text}".rstrip(": ")
    if isinstance(error, KeyboardInterrupt):
        return Failure("interrupted", line)
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or _says(error, OUT_OF_MEMORY):
        return Failure("oom", line)
    if isinstance(error, TimeoutError) or _says(error, TIMEOUT):
        return Failure("timeout", line)
    if isinstance(error, ConnectionError) or _says(error, LOST_PEER):
        return Failure("failed", f"rank {rank}: lost another rank: {text.rstrip(': ')[:200]}")
    found = blame(error)
    if found:
        return Failure("failed", f"{line} ({found.place})", found.traceback)
    return Failure("failed", line)


def tell(failure: Failure) -> None:
    """Print a failure, so that its line is the last."""
    lines = [failure.traceback, f"lab.train: error: {failure.error}"]
    print(without_secrets("\n".join(filter(None, lines))), file=sys.stderr)


def _first_line(error: BaseException) -> str:
    try:
        text = str(error)[:LONGEST].encode(errors="backslashreplace").decode()
    except Exception:  # a user's error may have no text
        return "(its text cannot be read)"
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def _says(error: BaseException, words: tuple[str, ...]) -> bool:
    """Return whether the first line of a library's untyped error has one of `words`."""
    text = _first_line(error).lower()
    return isinstance(error, RuntimeError) and any(word in text for word in words)
