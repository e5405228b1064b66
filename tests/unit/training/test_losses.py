"""Losses on their way from a fake GPU to the host."""

from __future__ import annotations

import pytest
import torch

from lab.training.trainer import Losses


class OnGpu:
    """A loss whose copy holds its value only after a wait for the event behind it."""

    device = torch.device("cuda")

    def __init__(self, value: float, log: list[str]) -> None:
        self.value, self.log = value, log

    def to(self, device: str, non_blocking: bool) -> OnGpu:
        assert (device, non_blocking) == ("cpu", True)
        self.log.append(f"copy {self.value:g}")
        return self

    def record_event(self) -> OnGpu:
        self.log.append("event")
        return self

    def synchronize(self) -> None:
        self.log.append("wait")

    def __float__(self) -> float:
        self.log.append(f"read {self.value:g}")
        return self.value


def test_the_host_waits_for_a_loss_when_it_reads_it_and_not_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[str] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: OnGpu(0.0, log))
    losses = Losses()
    assert losses.read_last() is None
    losses.append(OnGpu(1.0, log))  # type: ignore[arg-type]
    assert log == ["copy 1", "event"]
    losses.append(OnGpu(2.0, log))  # type: ignore[arg-type]
    assert log[2:] == ["wait", "read 1", "copy 2", "event"]
    assert losses.read_last() == 2
    assert losses.read_last() is None
    assert losses.read.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("found", "expected"), [((), 2.0), ((None, True), 2.0), ((True, False), float("nan"))]
)
def test_what_exchanges_find_turns_a_loss_into_nan(
    found: tuple[bool | None, ...], expected: float
) -> None:
    losses = Losses()
    flags = (None if flag is None else torch.tensor(flag) for flag in found)
    losses.append(torch.tensor(2.0), *flags)
    assert losses.read_last() == pytest.approx(expected, nan_ok=True)
