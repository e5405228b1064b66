"""Delay one phase of this rank's steps, to try what would find it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from lab.cluster.settings import Straggler
from lab.measure.clock import mark, seconds
from lab.sync.base import Sync

CALIBRATION_CYCLES = 10**8


class Plant:
    """The delay of a rank: once a step, where its phase does its work.

    In backward that is a hook of autograd, on a parameter whose gradient is about to be
    accumulated; in the exchange, the first hand-over to the network, within the exchange's job. On
    a GPU the stream is delayed, not the host, which may run ahead.
    """

    def __init__(self, straggler: Straggler, device: torch.device) -> None:
        self.straggler = straggler
        self._wait = _waiter(device)
        self._num_steps = 0
        self._due = False

    def over(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield `batches`, one for each step."""
        for batch in batches:
            self._due = self._num_steps % self.straggler.every == 0
            self._num_steps += 1
            if self.straggler.phase == "input":
                self._delay()
            yield batch

    def into(self, model: nn.Module, sync: Sync, optimizer: torch.optim.Optimizer) -> None:
        """Add hooks where the delayed phase works; `over` delays the input itself."""
        phase = self.straggler.phase
        if phase == "forward":
            sync.module.register_forward_pre_hook(self._delay)
        if phase == "backward":
            trained = [p for p in model.parameters() if p.requires_grad]
            trained[len(trained) // 2].register_hook(self._delay)
        if phase == "exchange":
            sync.comm.before_sending = self._delay
        if phase == "update":
            optimizer.register_step_pre_hook(self._delay)

    def _delay(self, *_: object) -> None:
        if self._due:
            self._due = False
            self._wait(self.straggler.delay_s)


def _waiter(device: torch.device) -> Callable[[float], None]:
    """Return a function that delays this rank by some seconds: on a GPU, its current stream."""
    if device.type == "cpu":
        return time.sleep
    torch.cuda._sleep(CALIBRATION_CYCLES)  # the clock rises to its rate under load
    begin = mark(device)
    torch.cuda._sleep(CALIBRATION_CYCLES)
    end = mark(device)
    torch.cuda.synchronize(device)
    cycles_per_s = CALIBRATION_CYCLES / seconds(begin, end)
    return lambda delay_s: torch.cuda._sleep(int(delay_s * cycles_per_s))
