"""The steady state of steps whose exchange runs on during the next one's forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lab.measure.spans import Span
from lab.simulate.events import Compute, Exchange, Rank, Schedule, both_passes
from lab.sync.send_order import send_order

STEPS = 4  # the second begins with an exchange under way; two more for it to settle


def steady(
    layers: Sequence[Compute],
    parts: Sequence[Exchange],
    schedule: Schedule,
    rank: Rank,
    besides_s: float,
    micro_batches: int = 1,
) -> tuple[float, tuple[Span, ...]]:
    """Simulate steps of PrioritySync: a layer's forward waits for its own parts alone.

    Args:
        parts: in the order of buckets; `layer` of each is the first to read one of its parameters,
            and the last to have a gradient of them.
        rank: at time 0.
        besides_s: seconds of a step besides forward and backward, in which exchanges go on.
        micro_batches: see lab.simulate.events.run.

    Returns:
        Seconds of the last step, and its spans, from its beginning.
    """
    sent = _in_order(layers, parts)
    behind = {part.layer: len(sent) - 1 - place for place, part in enumerate(sent)}
    pending: dict[int, int] = {}  # layers that have to wait, and the parts that may be left by then

    def begin(place: int) -> None:
        if place in pending:
            schedule.advance(rank)
            schedule.finish(rank, pending.pop(place))

    began_s = 0.0
    for _ in range(STEPS):
        began_s = rank.now_s
        both_passes(rank, layers, sent, schedule, micro_batches, begin)
        pending.update(behind)
        rank.now_s += besides_s
    return rank.now_s - began_s, tuple(
        _from(span, began_s) for span in rank.spans if span.end_s > began_s
    )


def _in_order(layers: Sequence[Compute], parts: Sequence[Exchange]) -> list[Exchange]:
    """Plan the order of sending as training does: from times of backward, and of parts alone."""
    ready_s = [sum(layer.backward_s for layer in layers[part.layer :]) for part in parts]
    send_s = [sum(stage.seconds for stage in part.stages) for part in parts]
    return [parts[place] for place in send_order(ready_s, send_s, [part.layer for part in parts])]


def _from(span: Span, origin_s: float) -> Span:
    start_s = max(span.start_s, origin_s)
    return replace(span, start_s=start_s - origin_s, end_s=span.end_s - origin_s)
