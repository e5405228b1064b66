"""Serial fraction and the Universal Scalability Law of every series of a study."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import optimize

from lab.analysis.speedup import Row
from lab.measure.intervals import UNKNOWN, Interval, student


@dataclass(frozen=True)
class Scalability:
    """How one series scales at one batch, strong scaling; intervals are over repeats.

    Attributes:
        serial_fraction: by ranks, the experimentally determined serial fraction e of A. Karp and
            H. Flatt (CACM 33(5), 1990): (1 / S - 1 / N) / (1 - 1 / N). It is constant if Amdahl's
            law holds, and grows with N where communication does.
        contention, coherency: sigma and kappa of N. Gunther's law (2008),
            S = N / (1 + sigma (N - 1) + kappa N (N - 1)); all NaN with fewer than two numbers of
            ranks above one.
    """

    series: str
    batch_size: int
    serial_fraction: Mapping[int, Interval]
    contention: Interval
    coherency: Interval

    @property
    def best_size(self) -> float:
        """The number of ranks beyond which more of them slow down; infinite if there is none."""
        if self.coherency.mid <= 0:
            return math.inf
        return math.sqrt(max(0.0, 1 - self.contention.mid) / self.coherency.mid)


def scalability(rows: Iterable[Row]) -> list[Scalability]:
    """Compute the scalability of each series that has runs on several ranks."""
    groups: defaultdict[tuple[object, ...], list[Row]] = defaultdict(list)
    for row in rows:
        if row.scaling == "strong" and row.world_size > 1 and row.speedups:
            groups[row.series, row.batch_size, row.context].append(row)
    return [_scalability(group) for group in groups.values()]


def serial_fraction(speedup: float, size: int) -> float:
    """Return Karp and Flatt's e of a speedup on `size` ranks."""
    return (1 / speedup - 1 / size) / (1 - 1 / size)


def universal_law(speedups: Mapping[int, float]) -> tuple[float, float]:
    """Fit sigma and kappa, neither of them negative, to speedups by ranks.

    By least squares of N / S - 1 = sigma (N - 1) + kappa N (N - 1), which is linear in both.
    """
    sizes = np.array(list(speedups), dtype=float)
    terms = np.stack([sizes - 1, sizes * (sizes - 1)], axis=1)
    (sigma, kappa), _ = optimize.nnls(terms, sizes / np.array(list(speedups.values())) - 1)
    return float(sigma), float(kappa)


def _scalability(rows: Sequence[Row]) -> Scalability:
    fractions = {
        row.world_size: student(
            np.array([serial_fraction(s, row.world_size) for s in row.speedups.values()])
        )
        for row in rows
    }
    shared = set.intersection(*(set(row.speedups) for row in rows))
    fits = [universal_law({r.world_size: r.speedups[k] for r in rows}) for k in sorted(shared)]
    contention = coherency = UNKNOWN
    if len(rows) > 1 and fits:
        contention, coherency = (student(np.array(values)) for values in zip(*fits, strict=True))
    return Scalability(rows[0].series, rows[0].batch_size, fractions, contention, coherency)
