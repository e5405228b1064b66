"""How often intervals hold what they say, and how often equal strategies are told apart.

python -m tests.support.coverage            prints the table of docs/measuring.md, simulated
python -m tests.support.coverage STUDY      counts it in a recorded study of equal cells
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

import lab
from lab.analysis.points import leaders_of, together
from lab.measure.statistics import of_ratio

REPEATS = (3, 4, 6, 10)
RATIO = 1.5  # of two strategies' true step times
Draw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


@dataclass(frozen=True)
class Noise:
    """Noise of step times, as added to their logarithms.

    Attributes:
        drift: standard deviation of what all cells of a repeat share.
        draw: the noise of single cells.
    """

    drift: float
    draw: Draw


NOISES = {
    "normal, 2 %": Noise(0.0, lambda rng, shape: 0.02 * rng.standard_normal(shape)),
    "normal, 2 %, and a shared drift of 5 %": Noise(
        0.05, lambda rng, shape: 0.02 * rng.standard_normal(shape)
    ),
    "Laplace, 2 %": Noise(0.0, lambda rng, shape: 0.02 * rng.laplace(size=shape)),
    "t of 3 degrees of freedom, 2 %": Noise(
        0.0, lambda rng, shape: 0.02 * rng.standard_t(3, size=shape)
    ),
    "normal, 1 %, and exponential stalls, 2 %": Noise(
        0.0,
        lambda rng, shape: 0.01 * rng.standard_normal(shape) + 0.02 * rng.exponential(size=shape),
    ),
}


def step_times(noise: Noise, studies: int, strategies: int, repeats: int) -> np.ndarray:
    """Draw step times of equal strategies, [studies, strategies, repeats]."""
    rng = np.random.default_rng(repeats)
    shared = noise.drift * rng.standard_normal((studies, 1, repeats))
    return np.exp(shared + noise.draw(rng, (studies, strategies, repeats)))


def coverage(noise: Noise, repeats: int, studies: int) -> float:
    """Return the share of studies whose interval of a ratio holds the true one."""
    times = step_times(noise, studies, 2, repeats)
    intervals = (of_ratio(RATIO * first, second) for first, second in times)
    return sum(one.lo <= RATIO <= one.hi for one in intervals) / studies


def false_leads(noise: Noise, repeats: int, studies: int, strategies: int) -> float:
    """Return the share of studies in which one of several equal strategies is left out."""
    times = step_times(noise, studies, strategies, repeats)
    names = [str(number) for number in range(strategies)]
    led = (
        leaders_of({n: dict(enumerate(t)) for n, t in zip(names, study, strict=True)})
        for study in times
    )
    return sum(len(each) < strategies for each in led) / studies


def recorded(groups: Sequence[Sequence[Mapping[int, float]]]) -> str:
    """Count how often the rule of reports and charts leaves out one of equal cells.

    Args:
        groups: of cells that compete, each with its step times by repeat. Neighbours are pairs.
    """
    every = [{str(at): steps_s for at, steps_s in enumerate(group)} for group in groups]
    pairs = [
        {"a": a, "b": b} for group in groups for a, b in zip(group[::2], group[1::2], strict=True)
    ]
    ratios = [of_ratio([*each["a"].values()], [*each["b"].values()]) for each in pairs]
    held = sum(one.lo <= 1 <= one.hi for one in ratios)
    apart, groups_apart = (
        sum(len(leaders_of(each)) < len(each) for each in some) for some in (pairs, every)
    )
    return (
        f"{len(pairs)} pairs of equal cells: {apart} with one leader, {held} intervals hold 1; "
        f"{groups_apart} of {len(every)} groups leave one out"
    )


def main(studies: int = 20_000) -> None:
    columns = [f"n = {n}" for n in REPEATS] + ["false leads at n = 3 (2, 6 strategies)"]
    print(f"| noise | {' | '.join(columns)} |")
    print("|---" * (len(REPEATS) + 2) + "|")
    for name, noise in NOISES.items():
        covered = " | ".join(f"{100 * coverage(noise, n, studies):.1f}" for n in REPEATS)
        led = ", ".join(f"{100 * false_leads(noise, 3, studies // 4, k):.1f}" for k in (2, 6))
        print(f"| {name} | {covered} | {led} |")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        points = lab.load(sys.argv[1]).points
        print(recorded([[point.steps_s for point in group] for group in together(points)]))
    else:
        main()
