"""The cost of a ModuleClock, measured on modules that do next to nothing."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from lab.layers.clock import ModuleClock
from lab.measure.clock import seconds

NUM_MODULES, ROUNDS = 200, 21
CPU = torch.device("cpu")


@dataclass(frozen=True)
class ClockCost:
    """Seconds that clocks add on a CPU.

    Attributes:
        span_s: to each span of forward.
        node_s: to backward, inside and outside its spans, for each node of the graph.
    """

    span_s: float
    node_s: float


class _Negate(nn.Module):
    """A module with one node in the graph."""

    def forward(self, x: Tensor) -> Tensor:
        return x.neg()


def clock_cost() -> ClockCost:
    """Run a chain of small modules with and without clocks in turns; medians decide.

    On a GPU clocks are queued with the kernels, so what they cost the host need not show there.
    """
    model = nn.Sequential(*(_Negate() for _ in range(NUM_MODULES)))
    clock = ModuleClock(model, CPU)
    span_s, node_s = np.empty(ROUNDS), np.empty(ROUNDS)
    for number in range(ROUNDS):
        forward_s, backward_s = _seconds(model)
        with clock:
            _, clocked_s = _seconds(model)
        spans = clock.passes[-1].forward
        in_spans = sum(seconds(begin, end) for _, begin, end in spans)
        span_s[number] = (in_spans - forward_s) / len(spans)
        node_s[number] = (clocked_s - backward_s) / NUM_MODULES
    return ClockCost(*(max(0.0, float(np.median(each))) for each in (span_s, node_s)))


def _seconds(model: nn.Module) -> tuple[float, float]:
    x = torch.zeros(1, requires_grad=True)
    began = time.perf_counter()
    y = model(x)
    between = time.perf_counter()
    y.backward()
    return between - began, time.perf_counter() - between
