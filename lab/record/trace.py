"""Timelines as Chrome trace events, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

The format is "Trace Event Format" (Google, 2016): complete events, `"ph": "X"`, whose `ts` and
`dur` are microseconds; a process (`pid`) is a rank and a thread (`tid`) one of its tracks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.measure import Span
from lab.settings.storage import DamagedFile, read_json, write_json

TIMELINE = "timeline.json"  # in a run's directory
ROWS = ("step", "data", "forward", "backward", "layer", "wait", "exchange", "codec", "optimizer")
Event = dict[str, Any]


@dataclass(frozen=True)
class Timeline:
    """Spans of all ranks, and facts about their run.

    Attributes: about: facts by name, as in a record: strategy, world_size, emulation, ...
    """

    spans: tuple[Span, ...]
    about: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def typical_step(self) -> Timeline:
        """Return the step of median length (on the first rank); the whole if no step is marked."""
        steps = sorted(
            (s for s in self.spans if s.row == "step" and s.rank == self.spans[0].rank),
            key=lambda span: span.end_s - span.start_s,
        )
        if not steps:
            return self
        name = steps[(len(steps) - 1) // 2].name
        whole = {s.rank: s for s in self.spans if (s.row, s.name) == ("step", name)}
        inside = (
            s
            for s in self.spans
            if s.rank in whole and whole[s.rank].start_s <= s.start_s < whole[s.rank].end_s
        )
        return Timeline(tuple(inside), {**self.about, "step": name})


def write_trace(path: Path, spans: Iterable[Span], about: Mapping[str, Any] | None = None) -> None:
    """Write spans as trace events; time 0 is the first one's start.

    Args: about: further facts, kept in `otherData`.

    Raises:
        ValueError: there are no spans.
        OSError: the file cannot be written.
    """
    ordered = sorted(spans, key=lambda span: (span.rank, _place(span.row), span.start_s))
    if not ordered:
        raise ValueError(f"{path}: cannot write a timeline without spans")
    origin = min(span.start_s for span in ordered)
    events: list[Event] = []
    threads: dict[tuple[int, str, int], int] = {}
    for span, lane in lanes(ordered):
        key = (span.rank, span.row, lane)
        if key not in threads:
            threads[key] = sum(rank == span.rank for rank, _, _ in threads)
            events += _names(*key, threads[key])
        begin, end = (round(1e9 * (moment - origin)) for moment in (span.start_s, span.end_s))
        place = {"pid": span.rank, "tid": threads[key]}
        times = {"ts": _microseconds(begin), "dur": _microseconds(end - begin)}
        events.append({"ph": "X", "name": span.name, "cat": span.row, **place, **times})
    other = dict(about or {})
    write_json(path, {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other})


def read_trace(path: Path) -> Timeline:
    """Read a file of `write_trace`.

    Raises:
        ValueError: the file is not such a trace.
        OSError: it cannot be read.
    """
    try:
        trace = read_json(path)
        events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
        timeline = Timeline(tuple(map(_span, events)), {**trace.get("otherData", {})})
        if not timeline.spans:
            raise ValueError("it has no spans")
        return timeline
    except DamagedFile:
        raise
    except (ValueError, OverflowError, KeyError, TypeError) as error:
        raise DamagedFile(f"{path}: not a timeline: {type(error).__name__}: {error}") from None


def lanes(spans: Iterable[Span]) -> list[tuple[Span, int]]:
    """Return each span with its lane, from 0, in which no spans of its row overlap.

    A viewer nests events of one thread, so spans that only overlap need separate threads. In the
    order of their starts, spans take the first free lane.
    """
    free_at: dict[tuple[int, str], list[float]] = {}
    placed: list[tuple[Span, int]] = []
    for span in sorted(spans, key=lambda span: span.start_s):
        ends = free_at.setdefault((span.rank, span.row), [])
        lane = next((i for i, end in enumerate(ends) if end <= span.start_s), len(ends))
        ends[lane:] = [span.end_s, *ends[lane + 1 :]]
        placed.append((span, lane))
    return sorted(placed, key=lambda pair: (pair[0].rank, _place(pair[0].row), pair[1]))


def _microseconds(nanoseconds: int) -> float:
    """Return the number that Perfetto, which multiplies by 1000 and truncates, reads as it is.

    1.001 would be 1000 ns there, within the event before it, and Perfetto drops events that
    overlap on a thread (its JsonTraceParser and SliceTracker).
    """
    value = nanoseconds / 1000
    return value if int(value * 1000) == nanoseconds else math.nextafter(value, math.inf)


def _place(row: str) -> tuple[int, str]:
    return (ROWS.index(row) if row in ROWS else len(ROWS)), row


def _names(rank: int, row: str, lane: int, thread: int) -> list[Event]:
    """Return metadata: a viewer's names and positions of a rank and one of its rows."""
    label = row if lane == 0 else f"{row} {lane + 1}"
    facts: dict[str, Event] = {"thread_name": {"name": label}}
    facts["thread_sort_index"] = {"sort_index": thread}
    if thread == 0:
        of_rank: dict[str, Event] = {"process_name": {"name": f"rank {rank}"}}
        facts = of_rank | {"process_sort_index": {"sort_index": rank}} | facts
    about = {"pid": rank, "tid": thread}
    return [{"ph": "M", "name": name, **about, "args": args} for name, args in facts.items()]


def _span(event: Event) -> Span:
    start, end = event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6
    if not math.isfinite(start + end) or end < start:
        raise ValueError(
            f"ts={event['ts']} dur={event['dur']}: must be finite, with dur at least 0"
        )
    return Span(int(event["pid"]), str(event["cat"]), str(event["name"]), start, end)
