"""A breakdown leaves a timeline, in which an overlapped exchange runs beside backward."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lab.analysis.timeline import read_trace
from lab.measure.clock import KEPT_STEPS
from lab.measure.spans import Span
from tests.conftest import Finished

QUICK = ("model=mlp", "model.hidden=[512,512]", "batch_size=32", "data.size=16", "optim.lr=0.01")
pytestmark = pytest.mark.timeout(120)


def of(spans: tuple[Span, ...], rank: int, row: str) -> list[Span]:
    return sorted((s for s in spans if (s.rank, s.row) == (rank, row)), key=lambda s: s.start_s)


@pytest.mark.parametrize("overlap", [True, False])
def test_exchanges_begin_before_backward_ends_if_they_overlap(
    train: Callable[..., Finished], tmp_path: Path, overlap: bool
) -> None:
    settings = (f"overlap={str(overlap).lower()}", "bucket_mb=0.5", "steps=9", "cell=c")
    done = train(2, "strategy=allreduce", "measure=breakdown", *settings, *QUICK)
    assert done.code == 0, done.err
    spans = read_trace(tmp_path / "runs/default/c/timeline.json").spans
    for rank in range(2):
        steps, backwards = of(spans, rank, "step"), of(spans, rank, "backward")
        assert len(steps) == len(backwards) == 4 < KEPT_STEPS  # warmup_steps=5 are not timed
        exchanges = of(spans, rank, "exchange")
        assert len(exchanges) > len(steps)
        for step, backward in zip(steps, backwards, strict=True):
            mine = [s for s in exchanges if step.start_s <= s.start_s < step.end_s]
            assert (mine[0].start_s < backward.end_s) is overlap
            assert all(span.end_s <= step.end_s for span in mine)
            assert mine[-1].end_s > backward.end_s  # the last gradient's
        if not overlap:
            assert all(a.end_s <= b.start_s for a, b in zip(exchanges, exchanges[1:], strict=False))
    first, second = (of(spans, rank, "step") for rank in range(2))
    # Ranks of one host share a clock: neither is done before the other begins.
    assert first[0].start_s < second[-1].end_s and second[0].start_s < first[-1].end_s
