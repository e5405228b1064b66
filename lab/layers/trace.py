"""The events of a Kineto or Chrome trace."""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lab.settings.reading import read_bytes

GZIP = b"\x1f\x8b"
LARGEST_BYTES = 2**29
LARGEST = 2.0**63  # times, sizes and counts beyond it are damage


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return the events of a trace, as JSON or gzipped JSON.

    Raises:
        ValueError: it cannot be read, or is no trace.
    """
    try:
        content = read_bytes(path, LARGEST_BYTES)
        trace = json.loads(_unzipped(content) if content.startswith(GZIP) else content)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from None
    except (EOFError, zlib.error, ValueError) as error:  # cut short, damaged, or not JSON
        raise ValueError(f"{path}: is no trace: {error}") from None
    except RecursionError:
        raise ValueError(f"{path}: is no trace: nested too deeply") from None
    events = trace.get("traceEvents") if isinstance(trace, dict) else trace
    if not isinstance(events, list) or not all(isinstance(each, dict) for each in events):
        raise ValueError(f"{path}: is no trace: has no list of traceEvents")
    return events


def number(value: object) -> float | None:
    """Return an event's time, size or count; None: it is not a number from 0 to 2^63."""
    try:
        found = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None
    return found if 0 <= found < LARGEST else None


def left_out(skipped: Mapping[str, int]) -> str:
    """Return how many events were left out, by reason: "copies without bytes: 2"."""
    return "; ".join(f"{reason}: {number}" for reason, number in skipped.items())


def _unzipped(content: bytes) -> bytes:
    """Unzip a trace, unless it is a few bytes that stand for gigabytes."""
    with gzip.open(io.BytesIO(content)) as file:
        found = file.read(LARGEST_BYTES + 1)
    if len(found) > LARGEST_BYTES:
        raise ValueError(f"it unzips to more than {LARGEST_BYTES / 2**20:.0f} MiB")
    return found
