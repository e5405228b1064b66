"""Python of the lab in a steady step: files entered, and calls."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType

import lab
from lab.distributed import world as worlds
from lab.distributed.worker import InlineWorker
from lab.settings.config import load
from lab.training import assemble
from lab.training.assemble import assembled
from tests.support.ranks import join, spawn

HOME = str(Path(lab.__file__).parent)
RUN = ("device=cpu", "strategy=onebit", "data.size=16", "batch_size=24", "steps=20")
CORE = ("codec/", "distributed/", "exchange/", "sync/")  # what exchanges
FREE_STEPS = 8  # in which buckets are planned


def calls_in_a_step() -> Counter[str]:
    """Return how often a step calls functions, by their files."""
    assemble.make_worker = lambda *_, **__: InlineWorker()
    found: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(HOME):
            found[frame.f_code.co_filename.removeprefix(f"{HOME}/")] += 1

    world = join()
    with assembled(load(RUN), world) as part:
        steps = part.trainer.steps()
        for _ in range(FREE_STEPS):
            next(steps)
        sys.setprofile(note)
        next(steps)
        sys.setprofile(None)
    worlds.stop()
    return found


def test_a_steady_step_is_few_calls_in_few_files() -> None:
    found = spawn(2, calls_in_a_step)[0]
    assert found.total() <= 225
    core = [name for name in found if name.startswith(CORE)]
    assert len(core) <= 8 and len(found) <= 12
