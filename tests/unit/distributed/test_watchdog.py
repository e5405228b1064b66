"""The watchdog names a rank's current wait, and a store that no longer answers."""

from __future__ import annotations

import dataclasses
import threading

import pytest
import torch.distributed as dist

from lab.distributed import worker
from lab.distributed.worker import Failure, Watchdog
from tests.support import HANG_S
from tests.support.worlds import one_of


class Noted:
    """Failures that a watchdog takes for fatal."""

    def __init__(self) -> None:
        self.failures: list[Failure] = []
        self.found = threading.Event()

    def __call__(self, failure: Failure) -> None:
        self.failures.append(failure)
        self.found.set()


def test_a_wait_outside_any_exchange_is_named_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost rank may be noticed outside an exchange, such as in a checkpoint's barrier."""
    monkeypatch.setattr(worker, "POLL_S", 0.01)
    monkeypatch.setattr(worker, "CONTROL_EXTRA_S", 0.0)
    noted, world = Noted(), one_of(2)
    watch = Watchdog(world, 0.1, noted)
    with world.waits.of("a barrier"):
        assert noted.found.wait(HANG_S)
    watch.close()
    text = "exchange_timeout_s=0.1: rank 0 waits in a barrier at step -1; rank 1 is lost"
    assert set(noted.failures) == {Failure("timeout", text)}


class Silent(dist.HashStore):
    """A store beyond a network that is lost: it answers nothing, not even with an error."""

    def __init__(self) -> None:
        super().__init__()
        self.back = threading.Event()

    def clone(self) -> Silent:
        return self

    def check(self, keys: list[str]) -> bool:
        self.back.wait(HANG_S)
        return False


def test_a_store_that_no_longer_answers_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "POLL_S", 0.01)
    monkeypatch.setattr(worker, "LIBRARY_MARGIN_S", 0.1)
    noted, store = Noted(), Silent()
    watch = Watchdog(dataclasses.replace(one_of(2), store=store), 0.1, noted)
    assert noted.found.wait(HANG_S)
    store.back.set()
    watch.close()
    assert "rank 0 has heard nothing from the launcher for 0.2 s" in noted.failures[0].error
