"""The events of a Kineto or Chrome trace."""

from __future__ import annotations

import gzip
import io
import json
import zlib
from pathlib import Path
from typing import Any

GZIP = b"\x1f\x8b"
LARGEST_BYTES = 2**29


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return the events of a trace, as JSON or gzipped JSON.

    Raises:
        ValueError: it cannot be read, or is no trace.
    """
    try:
        content = path.read_bytes()
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


def _unzipped(content: bytes) -> bytes:
    """Unzip a trace, unless it is a few bytes that stand for gigabytes."""
    with gzip.open(io.BytesIO(content)) as file:
        found = file.read(LARGEST_BYTES + 1)
    if len(found) > LARGEST_BYTES:
        raise ValueError(f"it unzips to more than {LARGEST_BYTES / 2**20:.0f} MiB")
    return found
