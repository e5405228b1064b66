"""A fake GPU with one stream and its own clocks: queued kernels run later, one after the other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lab.measure.layers import CYCLES_PER_S

CUDA = torch.device("cuda")


class FakeGpu:
    """A stand-in for torch.cuda where times are taken.

    Attributes:
        host_s: the host's clock.
        free_s: time when the stream will have finished all queued kernels. log: names of queued
        kernels, and "synchronize" for each wait of the host.
    """

    def __init__(self) -> None:
        self.host_s = self.free_s = 0.0
        self.log: list[str] = []

    def kernel(self, name: str, kernel_s: float, launch_s: float = 0.0) -> None:
        """Queue a kernel: the host takes `launch_s` to do so, the device `kernel_s` to run it."""
        self.log.append(name)
        self.host_s += launch_s
        self.free_s = max(self.free_s, self.host_s) + kernel_s

    def synchronize(self, *_: object) -> None:
        self.log.append("synchronize")
        self.host_s = max(self.host_s, self.free_s)

    def install(self, monkeypatch: pytest.MonkeyPatch, *modules: Any) -> None:
        """Replace torch.cuda, and the host's clock in `modules`, by this GPU's."""
        monkeypatch.setattr(torch.cuda, "_sleep", lambda c: self.kernel("sleep", c / CYCLES_PER_S))
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)
        monkeypatch.setattr(torch.cuda, "Event", type("Event", (FakeEvent,), {"gpu": self}))
        for module in modules:
            monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: self.host_s))


class FakeEvent:
    """torch.cuda.Event on a FakeGpu."""

    gpu: FakeGpu

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing
        self.synchronize = self.gpu.synchronize

    def record(self) -> None:
        self.gpu.log.append("event")
        self.at_s = max(self.gpu.free_s, self.gpu.host_s)

    def elapsed_time(self, end: FakeEvent) -> float:
        return 1000 * (end.at_s - self.at_s)
