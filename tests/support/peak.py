"""The peak rate of a host's network interface while a run trains, by its own counters."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lab.record.schema import Record

SAMPLE_S = 0.001
WINDOW_S = 0.01
PEAK = "peak.json"


class PeakRecorder:
    """Writes the most bytes that left rank 0's host within any 10 ms, between two steps.

    The run's last exchange, of all fragments at once, comes after these steps. For
    `recorder=tests.support.peak.PeakRecorder +recorder.first=20 +recorder.last=100`.
    """

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last
        self.samples: list[tuple[float, int]] = []  # seconds, and bytes sent so far
        self._on, self._off = threading.Event(), threading.Event()
        self._path = Path()

    def start(self, directory: Path, study: str, config: dict[str, Any], first_step: int) -> None:
        self._path = directory / PEAK
        threading.Thread(target=self._sample, daemon=True).start()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if step >= self.first:
            self._on.set()
        if step >= self.last:
            self._off.set()

    def finish(self, record: Record) -> None:
        self._off.set()
        found = {"peak_bytes": max(in_windows(self.samples)), "samples": len(self.samples)}
        self._path.write_text(json.dumps(found))

    def _sample(self) -> None:
        self._on.wait()
        while not self._off.is_set():
            self.samples.append((time.monotonic(), sent_bytes()))
            time.sleep(SAMPLE_S)


def sent_bytes() -> int:
    """Return the bytes that have left this network namespace by any interface but loopback."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    rows = (line.partition(":") for line in lines)
    return sum(int(row.split()[8]) for name, _, row in rows if name.strip() != "lo")


def in_windows(samples: list[tuple[float, int]]) -> Iterator[int]:
    """Yield the bytes sent in each window that begins with a sample."""
    end = 0
    for time_s, sent in samples:
        while end + 1 < len(samples) and samples[end + 1][0] <= time_s + WINDOW_S:
            end += 1
        yield samples[end][1] - sent
