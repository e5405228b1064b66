"""A breakdown leaves a timeline, in which an overlapped exchange runs during backward."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest

from lab.distributed import world as worlds
from lab.measure.clock import KEPT_STEPS
from lab.measure.spans import Span
from lab.record.trace import read_trace
from tests.support import ranks

QUICK = ("model=mlp", "model.hidden=[512,512]", "batch_size=32", "data.size=16", "optim.lr=0.01")


def of(spans: tuple[Span, ...], rank: int, row: str) -> list[Span]:
    return sorted((s for s in spans if (s.rank, s.row) == (rank, row)), key=lambda s: s.start_s)


@pytest.mark.parametrize("overlap", [True, False])
def test_exchanges_begin_before_backward_ends_if_they_overlap(
    tmp_path: Path, overlap: bool
) -> None:
    settings = (f"overlap={overlap}", "bucket_mb=0.5", "steps=9", f"runs_dir={tmp_path}", "cell=c")
    ranks.train(2, "strategy=allreduce", "measure=breakdown", *settings, *QUICK)
    spans = read_trace(tmp_path / "default/c/timeline.json").spans
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
    # Ranks of one host share a clock, so each exchange ends after the other rank's begins.
    assert first[0].start_s < second[-1].end_s and second[0].start_s < first[-1].end_s


AHEAD_S = 1000.0  # far more than any message takes


def compare_clocks() -> tuple[tuple[float, float], list[str]]:
    """Shift each rank's clock, as if it were another host's."""
    world = dataclasses.replace(ranks.join(), num_hosts=2)
    clock = time.perf_counter
    worlds.time.perf_counter = lambda: clock() + world.rank * AHEAD_S
    answer = world.clock_ahead_s(), world.gather_text("é" * world.rank)
    worlds.stop()
    return answer


def test_ranks_compare_clocks_and_texts() -> None:
    (own, first), ((ahead_s, error_s), second) = ranks.spawn(2, compare_clocks)
    assert own == (0.0, 0.0)
    assert abs(ahead_s - AHEAD_S) <= error_s < 1.0
    assert first == second == ["", "é"]
