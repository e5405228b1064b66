"""The events of a Kineto or Chrome trace."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

GZIP = b"\x1f\x8b"


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return the events of a trace, as JSON or gzipped JSON.

    Raises:
        ValueError: it cannot be read, or is no trace.
    """
    try:
        content = path.read_bytes()
        content = gzip.decompress(content) if content.startswith(GZIP) else content
        trace = json.loads(content)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from None
    except (EOFError, ValueError) as error:  # cut short, or not JSON
        raise ValueError(f"{path}: is no trace: {error}") from None
    events = trace.get("traceEvents") if isinstance(trace, dict) else trace
    if not isinstance(events, list) or not all(isinstance(each, dict) for each in events):
        raise ValueError(f"{path}: is no trace: has no list of traceEvents")
    return events
