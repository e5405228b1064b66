"""Measure what the marks of own times add to a step: steps with them and without, in turns."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch

from lab.benchmarks.harness import difference, middle, on_ranks, ratio
from lab.benchmarks.present import Column, intervals, medians, on_ranks_of, text
from lab.benchmarks.request import BenchRequest
from lab.benchmarks.step import in_turns
from lab.distributed.comm import Completed
from lab.distributed.world import World
from lab.draw.text import number_of
from lab.measure import PHASES
from lab.measure.clock import Clock
from lab.training.assemble import assembled

NAMES = ("with marks", "without")
STAGES = 2  # of an exchange, in the steps without work
EMPTY_STEPS = 2000


@on_ranks
def measure(request: BenchRequest, world: World) -> dict[str, Any]:
    """Measure steps with what the host does between them, as the clock also works there.

    On GPUs, which the host runs ahead of, steps alone.
    """
    config = request.config
    with ExitStack() as stack:
        parts = [stack.enter_context(assembled(config, world)) for _ in NAMES]
        _, without = (part.trainer for part in parts)
        # It marks nothing but the ends of its steps.
        without.clock = without.sync.clock = Clock(world.device, breakdown=False, own=False)
        _, turn_s, step_s = in_turns(parts, world)
        num_buckets = parts[0].trainer.clock.own_times().ready_seconds().shape[1]
    times = step_s if world.device.type == "cuda" else turn_s
    marked, plain = ({"name": n, "step_s": middle(t)} for n, t in zip(NAMES, times, strict=True))
    return {
        "rows": [{**marked, "ratio": ratio(*times), "added_s": difference(*times)}, plain],
        "num_pairs": times.shape[1],
        "num_buckets": num_buckets,
        "marks_s": _empty_step_s(True, num_buckets) - _empty_step_s(False, num_buckets),
    }


def _empty_step_s(own: bool, num_buckets: int) -> float:
    """Return the seconds of processor time for a step without work, with `num_buckets`."""
    clock = Clock(torch.device("cpu"), breakdown=False, own=own)

    def job() -> Iterator[Completed]:
        for _ in range(STAGES):
            yield Completed()

    began = time.thread_time()
    for _ in range(EMPTY_STEPS):
        with clock.step():
            for phase in PHASES:
                with clock.phase(phase):
                    pass
            for bucket in range(num_buckets):
                clock.ready(bucket)
                with clock.exchange_work():
                    pass
                for _ in clock.traced("", job, True, lambda: 0.0, in_line=True)():
                    pass
    return (time.thread_time() - began) / EMPTY_STEPS


COLUMNS: dict[str, Column] = {
    "": text("name"),
    **medians("turn (ms)", "step_s", 1e3, 3),
    "ratio": intervals("ratio", reference="1"),
    "added (us)": intervals("added_s", 1e6, reference=""),
}


def notes(result: dict[str, Any]) -> list[str]:
    share = 100 * result["marks_s"] / result["rows"][1]["step_s"]["median"]
    return [
        f"medians of {result['num_pairs']} turns per row {on_ranks_of(result)}, as timed by the "
        "slowest rank; [95 % intervals] resample whole rounds",
        f"recording alone, in steps without work: {1e6 * result['marks_s']:.1f} us for "
        f"{number_of(result['num_buckets'], 'bucket')}, {share:.3f} % of a turn",
    ]
