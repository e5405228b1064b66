"""Results of lab.bench on a page: its table, its notes and its figure."""

from __future__ import annotations

import base64
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.benchmarks.views.show import draw, table


@dataclass(frozen=True)
class Benched:
    """A benchmark's result.

    Attributes:
        text: its table, and how to read it.
        picture: a data URL of its figure; empty: it has none.
    """

    title: str
    command: str
    text: str
    picture: str


def read_benched(path: Path) -> Benched:
    """Read a result of lab.bench.

    Raises:
        ValueError: the file holds no such result.
        OSError: it cannot be read.
    """
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        text = table(result)
    except (ValueError, KeyError, TypeError, ImportError) as error:
        why = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path}: is no result of lab.bench: {why}") from None
    title = f"{result['bench']}: {path.stem.replace('_', ' ')}"
    return Benched(title, result.get("command", ""), text, _picture(result))


def _picture(result: dict[str, Any]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "figure.svg")
        if not draw(result, path):
            return ""
        data = base64.b64encode(path.read_bytes()).decode()
    return f"data:image/svg+xml;base64,{data}"
