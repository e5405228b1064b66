"""Clocks, statistics and the environment. This package measures and writes nothing.

What it measures in time are spans: the pieces of a rank's timeline.
"""

from __future__ import annotations

from dataclasses import dataclass

PHASES = ("data", "forward", "backward", "exchange", "update")  # of a step, marked by breakdowns
# A rank's own work in a step, in the order of time: since the step before, for data, ...
OWN = ("between", "input", "forward", "backward", "exchange", "update")


@dataclass(frozen=True)
class Span:
    """One bar of a timeline, measured or simulated.

    Attributes:
        row: track of the timeline: "forward", "backward", "layer", "exchange", "codec",
            "optimizer", "data".
        name: piece of work, such as the bucket that is exchanged.
        start_s, end_s: seconds on a clock that all spans of a timeline share.
    """

    rank: int
    row: str
    name: str
    start_s: float
    end_s: float
