"""Times of collectives from a user's log: of nccl-tests, or of PARAM's comms benchmark for torch.

nccl-tests prints a table, and with -J a JSON (NVIDIA/nccl-tests, src/util.cu); PARAM prints a line
COMMS-RES-OPERATION for each size (facebookresearch/param, train/comms/pt/comms.py). The size of a
gather or scatter is that of all ranks together in both. Times are those out of place, or the median
over ranks.
"""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.settings.storage import read_bytes

MICRO = 1e-6
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter")
RANK = re.compile(r"^(?:\S+:\s*)?#\s+Rank\s+(\d+)\s", re.MULTILINE)
PROGRAM = re.compile(r"\b(all_reduce|all_gather|reduce_scatter)_perf\b")
NUMBER = r"([\d.]+(?:e[+-]?\d+)?)"
# Of nccl-tests: bytes, values, type, operation, root in later versions, time, algbw, busbw.
ROW = re.compile(
    rf"^(?:\S+:\s)?\s*(\d+)\s+\d+\s+[a-z]\w*\s+[a-z]\w*\s+(?:-?\d+\s+)?{NUMBER}\s+{NUMBER}\s+{NUMBER}\s",
    re.MULTILINE,
)
PARAM = re.compile(r"COMMS-RES-(all_reduce|all_gather|reduce_scatter)\w*(?:-\S*)?((?:\s+[\d.]+)+)")
FULL = 9  # columns of PARAM: bytes, values, p50, p75, p95, least, most, algbw, busbw


@dataclass(frozen=True)
class Curve:
    """Seconds of a collective by size, on so many ranks.

    Attributes:
        operation: one of OPERATIONS.
        points: bytes and seconds, in ascending order; bytes are those of all ranks together, but
            of an all-reduce those of one.
    """

    operation: str
    ranks: int
    points: tuple[tuple[float, float], ...]

    def within(self, num_bytes: float) -> float:
        """Return the nearest size between the smallest and the largest."""
        return min(max(num_bytes, self.points[0][0]), self.points[-1][0])

    def seconds(self, num_bytes: float) -> float:
        """Return the seconds at a size `within` those measured, logarithms interpolated."""
        place = min(bisect_right(self.points, (num_bytes, math.inf)), len(self.points) - 1)
        if place == 0:
            return self.points[0][1]
        (low, low_s), (high, high_s) = self.points[place - 1 : place + 1]
        share = math.log(num_bytes / low) / math.log(high / low)
        return low_s * (high_s / low_s) ** share

    def __str__(self) -> str:
        ends = [f"{_size(num_bytes)} in {1e6 * s:.4g} us" for num_bytes, s in self.points]
        return f"{self.operation} on {self.ranks} ranks, {ends[0]} to {ends[-1]}"


def read_log(path: Path) -> tuple[Curve, ...]:
    """Read the collectives of a log.

    Raises:
        ValueError: the file cannot be read, or holds no such collective.
    """
    where = f"hardware.from={path}"
    try:
        text = read_bytes(path).decode("utf-8", "replace")
    except OSError as error:
        raise ValueError(f"{where}: {error.strerror or error}") from None
    found = _of_json(where, text) if text.lstrip().startswith("{") else [*_of_text(text)]
    if not found:
        raise ValueError(
            f"{where}: contains no line from nccl-tests or from PARAM's comms benchmark for "
            f"{', '.join(OPERATIONS)}"
        )
    return tuple(found)


def _of_text(text: str) -> Iterator[Curve]:
    if rows := [[*map(float, row)] for row in ROW.findall(text)]:
        yield _curve(_operation(text), len(set(RANK.findall(text))), rows)
    by_operation = defaultdict[str, list[list[float]]](list)
    for operation, numbers in PARAM.findall(text):
        columns = [*map(float, numbers.split())]
        if len(columns) >= FULL:
            by_operation[operation].append([columns[0], columns[2], *columns[FULL - 2 : FULL]])
    for operation, rows in by_operation.items():
        yield _curve(operation, 0, rows)


def _of_json(where: str, text: str) -> list[Curve]:
    try:
        node = json.loads(text)
        operation = _operation(" ".join(map(str, node.get("args", []))))
        rows = list[list[float]]()
        for row in node["results"]:
            measured: dict[str, Any] = row["out_of_place"] or row["in_place"]
            us = measured["time"] if "time" in measured else measured["cpu_time"]
            rows.append([*map(float, (row["size"], us, measured["alg_bw"], measured["bus_bw"]))])
        devices = len(node.get("config", {}).get("devices", []))
        return [_curve(operation, devices, rows)] if rows else []
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{where}: not JSON from nccl-tests ({error})") from None


def _operation(text: str) -> str:
    """Return the operation that the program of nccl-tests in a text measures."""
    program = PROGRAM.search(text)
    return program[1] if program else OPERATIONS[0]


def _curve(operation: str, ranks: int, rows: Sequence[Sequence[float]]) -> Curve:
    """Make a curve.

    Args:
        ranks: 0: as many as the largest bandwidths imply. That of the bus is 2(N-1)/N times that of
            the algorithm of an all-reduce, (N-1)/N times of others (nccl-tests,
            doc/PERFORMANCE.md).
        rows: bytes, microseconds, and both bandwidths: of the algorithm and of the bus.
    """
    if not ranks:
        algorithm, bus = max((algorithm, bus) for *_, algorithm, bus in rows)
        passes = 2 if operation == "all_reduce" else 1
        left = 1 - bus / algorithm / passes if algorithm else 0.0
        ranks = round(1 / left) if left > 0 else 0
    known = {size: MICRO * us for size, us, *_ in rows if size > 0 and us > 0}
    if ranks < 2 or not known:
        raise ValueError(
            f"{operation}: needs at least 2 ranks and 1 size; found ranks={ranks} and "
            f"sizes={len(known)}"
        )
    return Curve(operation, ranks, tuple(sorted(known.items())))


def _size(num_bytes: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.4g} {unit}"
    return f"{num_bytes:.0f} B"
