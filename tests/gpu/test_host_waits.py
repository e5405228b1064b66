"""No step makes the host wait for the GPU, whatever the strategy: torch's sync debug mode shows it.

What it does not see: waiting for an event, and what libraries other than torch do.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from lab.distributed import world as worlds
from lab.settings.config import load
from tests.distributed.test_host_waits import CASES, steps
from tests.gpu.conftest import DEVICE
from tests.support.ranks import join, spawn

NUM_RANKS = min(2, torch.cuda.device_count()) if DEVICE == "cuda" else 2
# Cases that may wait, and where they do.
MAY_WAIT = {"precision=fp16": "gradients_finite"} if DEVICE == "cuda" else {}


@contextmanager
def errors_for_waits() -> Iterator[None]:
    """Whatever waits raises an error, on the CPU nothing does."""
    if DEVICE == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if DEVICE == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def first_waits() -> dict[str, str]:
    """By case, the call that waits first and how it came to be called; "" if none does."""
    world, found = join(f"device={DEVICE}"), {}
    for name, settings in CASES.items():
        try:
            steps(load([f"device={DEVICE}", *settings]), world, errors_for_waits)
            found[name] = ""
        except RuntimeError:
            found[name] = traceback.format_exc()
    worlds.stop()
    return found


@pytest.fixture(scope="module")
def waits() -> dict[str, str]:
    return spawn(NUM_RANKS, first_waits, timeout_s=300)[0]  # kernels are compiled on the way


@pytest.mark.parametrize("case", CASES)
def test_the_host_waits_for_nothing_in_a_step(case: str, waits: dict[str, str]) -> None:
    place = MAY_WAIT.get(case)
    assert (place in waits[case]) if place else waits[case] == ""
