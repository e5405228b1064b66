"""The watchdog names a rank's current wait, within and outside exchanges."""

from __future__ import annotations

import threading

import pytest

from lab.distributed import watchdog
from lab.distributed.watchdog import Failure, Watchdog
from tests.support import HANG_S
from tests.support.worlds import one_of


def test_a_wait_outside_any_exchange_is_named_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost rank may be noticed outside an exchange, such as in a checkpoint's barrier."""
    monkeypatch.setattr(watchdog, "POLL_S", 0.01)
    monkeypatch.setattr(watchdog, "CONTROL_EXTRA_S", 0.0)
    failures: list[Failure] = []
    found = threading.Event()

    def note(failure: Failure) -> None:
        failures.append(failure)
        found.set()

    world = one_of(2)
    watch = Watchdog(world, 0.1, note)
    with world.waits.of("a barrier"):
        assert found.wait(HANG_S)
    watch.close()
    text = "exchange_timeout_s=0.1: rank 0 waits in a barrier at step -1; rank 1 is lost"
    assert set(failures) == {Failure("timeout", text)}
