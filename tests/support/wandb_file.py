"""Read the file of an offline wandb run, with wandb's own messages.

wandb's reader is part of a program of its own. The file is a log of LevelDB ("log_format.md"):
blocks of 32 KiB, each of fragments with a header of checksum, length and type. wandb puts seven
bytes first, which count as part of the first block.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2

from tests.support import HANG_S

BLOCK, HEADER, FILE_HEADER = 2**15, 7, 7
FULL, FIRST, LAST = 1, 2, 4  # types of fragments; 3 is in the middle


def curves(path: Path) -> dict[str, dict[int, float]]:
    """Return each curve of the run: value by step."""
    found: defaultdict[str, dict[int, float]] = defaultdict(dict)
    for record in records(path):
        for item in record.history.item:
            name = item.key or "/".join(item.nested_key)
            value = json.loads(item.value_json)
            if isinstance(value, int | float) and not name.startswith("_"):
                found[name][record.history.step.num] = value
    return dict(found)


def settled(folder: Path, count: int = 1) -> list[list[Any]]:
    """Return the records of each start of a wandb run, in order, once all of them are closed.

    wandb writes in a process of its own, which on a busy machine outlasts `finish`.
    """
    deadline = time.monotonic() + HANG_S
    while True:
        starts = [[*records(path)] for path in sorted(folder.rglob("*.wandb"))]
        # A sample of the machine's load may come after the end.
        if len(starts) == count and all(any(r.HasField("exit") for r in s) for s in starts):
            return starts
        assert time.monotonic() < deadline, f"{len(starts)} files, not closed after {HANG_S:g} s"
        time.sleep(0.2)


def only(start: list[Any], kind: str) -> list[Any]:
    """Return the parts of one kind that records hold."""
    return [getattr(each, kind) for each in start if each.HasField(kind)]


def records(path: Path) -> Iterator[Any]:
    """Yield all records of the run; see wandb/proto/wandb_internal.proto."""
    for message in _messages(path.read_bytes()):
        yield wandb_internal_pb2.Record.FromString(message)  # type: ignore[attr-defined]


def _messages(content: bytes) -> Iterator[bytes]:
    message, at = b"", FILE_HEADER
    while at + HEADER <= len(content):
        if BLOCK - at % BLOCK < HEADER:  # padding at the end of a block
            at += BLOCK - at % BLOCK
            continue
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        at += HEADER
        begun = b"" if kind in (FULL, FIRST) else message
        message = begun + content[at : at + length]
        at += length
        if kind in (FULL, LAST):
            yield message
