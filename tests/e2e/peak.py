"""The peak of a host's network interface while a run trains, by its own counters."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lab.record.schema import Record

WINDOW = 5  # steps: more than an exchange takes, fewer than lie between two of them
PEAK = "peak.json"


class PeakRecorder:
    """Writes the most bytes that left rank 0's host within a few steps, between two steps.

    Steps, not milliseconds, bound the windows: so a slow machine finds the same peak. The run's
    last exchange, of all fragments at once, comes after these steps. For
    `recorder=tests.e2e.peak.PeakRecorder +recorder.first=20 +recorder.last=100`.
    """

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last
        self.sent: list[int] = []  # bytes so far, after each step
        self._path = Path()

    def start(self, directory: Path, study: str, config: dict[str, Any], first_step: int) -> None:
        self._path = directory / PEAK

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if self.first <= step <= self.last:
            self.sent.append(sent_bytes())

    def finish(self, record: Record) -> None:
        self._path.write_text(json.dumps({"peak_bytes": max(in_windows(self.sent))}))


def sent_bytes() -> int:
    """Return the bytes that have left this network namespace by any interface but loopback."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    rows = (line.partition(":") for line in lines)
    return sum(int(row.split()[8]) for name, _, row in rows if name.strip() != "lo")


def in_windows(sent: list[int]) -> Iterator[int]:
    """Yield the bytes that left within each window."""
    for before, after in zip(sent, sent[WINDOW:], strict=False):
        yield after - before
