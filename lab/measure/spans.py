"""Spans of time: what a rank did, from when to when."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """One bar of a timeline, measured or simulated.

    Attributes:
        row: what kind of work, as "forward", "backward", "exchange", "codec", "optimizer", "data".
        name: of this piece of it, as the bucket that is exchanged.
        start_s, end_s: seconds, of a clock that all spans of a timeline share.
    """

    rank: int
    row: str
    name: str
    start_s: float
    end_s: float
