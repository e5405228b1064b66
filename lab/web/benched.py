"""Results of lab.bench on a page: its table, its notes and its figure."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.benchmarks.present import chart_of, is_result, text_of
from lab.draw.chart import drawn
from lab.settings.errors import one_line
from lab.settings.reading import DamagedFile, read_json


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
        DamagedFile: it holds no such result.
        OSError: it cannot be read.
    """
    result = read_json(path)
    if not is_result(result):
        raise DamagedFile(f"{path}: is no result of lab.bench")
    title = f"{result['bench']}: {path.stem.replace('_', ' ')}"
    try:
        return Benched(title, str(result["command"]), text_of(result), _picture(result))
    except Exception as error:  # a damaged result fails in many ways
        why = f"{type(error).__name__}: {one_line(error)}"
        raise DamagedFile(f"{path}: is no result of lab.bench: {why}") from None


def _picture(result: dict[str, Any]) -> str:
    chart = chart_of(result)
    if not chart:
        return ""
    data = base64.b64encode(drawn(chart.spec(), "svg")).decode()
    return f"data:image/svg+xml;base64,{data}"
