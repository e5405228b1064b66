"""A breakdown leaves a timeline, in which an overlapped exchange runs during backward."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig

from lab.distributed import world as worlds
from lab.distributed.launcher import each_alone
from lab.distributed.world import World
from lab.measure import Span
from lab.measure import clock as clocks
from lab.measure.clock import KEPT_STEPS, Mark, StepMarks
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


NUM_STEPS = 9
AHEAD_S = 1000.0  # far more than any message takes


def on_hosts(world: World) -> World:
    """Let each rank be on a host of its own."""
    world.comm.nodes = each_alone(world.size)
    return world


def compare_clocks() -> tuple[tuple[float, float], list[str]]:
    """Shift each rank's clock, as if it were another host's."""
    world = on_hosts(ranks.join())
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


def train_beside_another_clock(arguments: list[str], config: DictConfig) -> list[float]:
    """Train as on hosts whose clocks differ; return when steps began, on the true clock."""
    clock, join = time.perf_counter, ranks.assemble.join
    ahead_s = int(os.environ["RANK"]) * AHEAD_S
    begun: list[float] = []

    def noted(after: Mark | None, begin: float, **pooled: Any) -> StepMarks:
        begun.append(begin - ahead_s)
        return StepMarks(after, begin, **pooled)

    time.perf_counter = lambda: clock() + ahead_s
    clocks.StepMarks = noted
    ranks.assemble.join = lambda config: on_hosts(join(config))
    ranks.execute(arguments, config)
    return begun[-NUM_STEPS:]


def test_on_one_axis_steps_of_hosts_differ_as_they_did_within_the_stated_error(
    tmp_path: Path,
) -> None:
    settings = (*QUICK, f"steps={NUM_STEPS}", f"runs_dir={tmp_path}", "cell=c")
    run = ranks.composed("strategy=allreduce", "measure=breakdown", *settings)
    begun = ranks.spawn(2, train_beside_another_clock, *run)
    timeline = read_trace(tmp_path / "default/c/timeline.json")
    found = re.search(r"rank 1 \+(\S+) ms, within (\S+) ms", timeline.about["clocks"])
    assert found
    ahead_s, error_s = (1e-3 * float(text) for text in found.groups())
    assert abs(ahead_s - AHEAD_S) <= error_s < 1.0
    first, second = ({s.name: s.start_s for s in of(timeline.spans, r, "step")} for r in (0, 1))
    assert len(first) == 4
    for name in first:
        step = int(name.removeprefix("step "))
        shown, true = (second[name] - first[name], begun[1][step] - begun[0][step])
        assert abs(shown - true) <= error_s + 1e-6  # traces have microseconds
