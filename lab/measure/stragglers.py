"""Find ranks whose own work takes longer than that of the others, and in which phase.

Durations of ranks are compared, never their clocks. In each step a rank's time is paired with the
median of the other ranks, so that drift that all share cancels. The noise floor comes from medians
over blocks of steps: how far the ranks that are alike differ, and how much a rank's own excess
changes in the course of the run. A persistent excess must stand out from it in almost every block.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import bdtrc

from lab.measure import OWN

Times = NDArray[np.float64]

MIN_STEPS = 9  # below, too few to tell a slow rank from noise
MAX_BLOCKS, BLOCK_STEPS = 8, 3  # at most so many blocks, of at least so many steps
LEAST_SHARE = 0.05  # of the step; a smaller excess is not named
ABOVE_FLOOR = 2.0  # an excess of less than so many noise floors is noise
DOUBT_OF_TWO = 2.0  # two ranks show no spread of normal ones: both limits are so much higher
FLOOR_QUANTILE = 0.9  # a burst of load in one block raises no floor
PERSISTENT = 0.85  # share of the blocks in which at least half of the excess is there
# Stalls of one rank: so many deviations above its usual excess, so rarely by chance in a run.
STALL_DEVIATIONS, CHANCE = 8.0, 1e-3
DEVIATION = 1.4826  # standard deviations of normal noise per median absolute deviation
LEAST_LOSS = 0.005  # mean loss by stalls, as a share of the step


@dataclass(frozen=True)
class Slow:
    """One phase of one rank that takes longer than on the others.

    Attributes:
        phase: one of OWN.
        delay_s: the excess over the others' median, the median over the steps that have it.
        share: of the steps that have it; 1: it is persistent.
        floor_s: the noise floor, which the delay exceeds at least ABOVE_FLOOR times.
    """

    rank: int
    phase: str
    delay_s: float
    share: float
    floor_s: float

    @property
    def mean_s(self) -> float:
        """The mean delay of a step."""
        return self.delay_s * self.share


def stragglers(own_s: Times, step_s: float, phases: Collection[str] = OWN) -> list[Slow]:
    """Find slow ranks; the longest mean delay comes first.

    Args:
        own_s: seconds of own work, [ranks, steps, len(OWN)]; NaN: unknown.
        step_s: seconds of a step.
        phases: those to judge, of OWN.
    """
    if own_s.shape[0] < 2 or own_s.shape[1] < MIN_STEPS:
        return []
    found = list[Slow]()
    whole = np.median(np.nan_to_num(own_s), axis=1).sum(axis=1)  # medians of phases, [ranks]
    for index, phase in enumerate(OWN):
        times = own_s[:, :, index]
        if phase not in phases or np.isnan(times).all(axis=1).any():
            continue
        times = np.nan_to_num(times)  # an exchange every few steps
        lasting = [s for s in _persistent(times, step_s, phase) if _is_late(s, whole)]
        slow = {each.rank for each in lasting}
        stalls = _intermittent(times, step_s, phase, len(phases))
        found += [*lasting, *(each for each in stalls if each.rank not in slow)]
    return sorted(found, key=lambda each: -each.mean_s)


def _persistent(times: Times, step_s: float, phase: str) -> Iterator[Slow]:
    suspects = _suspects(np.median(times, axis=1))
    alike = np.delete(times, suspects, axis=0)
    excess = times - np.median(alike, axis=0)
    spread = np.abs(_block_medians(np.delete(excess, suspects, axis=0)))
    doubt = DOUBT_OF_TWO if len(times) == 2 else 1.0
    for rank in suspects:
        delay_s = float(np.median(excess[rank]))
        blocks = _block_medians(excess[rank : rank + 1])
        floors = (np.quantile(each, FLOOR_QUANTILE) for each in (spread, np.abs(blocks - delay_s)))
        floor_s = float(max(floors))
        lasts = (blocks >= delay_s / 2).mean() >= PERSISTENT
        if delay_s >= doubt * max(LEAST_SHARE * step_s, ABOVE_FLOOR * floor_s) and lasts:
            yield Slow(rank, phase, delay_s, 1.0, floor_s)


def _is_late(slow: Slow, whole: Times) -> bool:
    """Return whether a rank's whole work is longer too, given that of all ranks.

    If not, it hurries elsewhere, or waits for another rank where only work was expected.
    """
    return whole[slow.rank] - np.median(np.delete(whole, slow.rank)) >= slow.delay_s / 2


def _suspects(medians: Times) -> list[int]:
    """Return the slower ranks, at most half of them: those above the widest gap between two."""
    order = np.argsort(medians)
    gaps = np.diff(medians[order])
    first = (len(medians) - 1) // 2
    return [int(rank) for rank in order[first + int(np.argmax(gaps[first:])) + 1 :]]


def _block_medians(times: Times) -> Times:
    """Return the medians of blocks of consecutive steps: [ranks, steps] -> [ranks, blocks]."""
    num_blocks = min(MAX_BLOCKS, times.shape[1] // BLOCK_STEPS)
    blocks = np.array_split(times, num_blocks, axis=1)
    return np.stack([np.median(block, axis=1) for block in blocks], axis=1)


def _intermittent(times: Times, step_s: float, phase: str, num_phases: int) -> Iterator[Slow]:
    """Find ranks that stall in some steps, more often than chance would have it.

    By chance every stall, of one or several steps on end, hits any rank alike (binomial test).
    """
    size = len(times)
    others = np.stack([np.median(np.delete(times, rank, axis=0), axis=0) for rank in range(size)])
    excess = times - others
    unusual = excess - np.median(excess, axis=1, keepdims=True)
    noise_s = DEVIATION * float(np.median(np.abs(unusual)))
    stalled = unusual > max(2 * LEAST_SHARE * step_s, STALL_DEVIATIONS * noise_s)
    begins = stalled & ~np.roll(stalled, 1, axis=1)
    counts = begins.sum(axis=1)
    for rank in range(size):
        # The probability of so many stalls or more.
        by_chance = bdtrc(counts[rank] - 1, counts.sum(), 1 / size)
        if by_chance > CHANCE / (size * num_phases):
            continue
        delay_s = float(np.median(excess[rank, stalled[rank]]))
        slow = Slow(rank, phase, delay_s, float(stalled[rank].mean()), noise_s)
        if slow.mean_s >= LEAST_LOSS * step_s:
            yield slow
