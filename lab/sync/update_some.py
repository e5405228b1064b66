"""An update of some parameters, by an optimizer that has them all."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.optim import Optimizer


def update_some(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Let `optimizer` update `parameters` alone, and drop their gradients.

    For the time of its step the optimizer's groups hold nothing else, so it costs what these
    parameters cost. The results are those of one step for all only if the optimizer treats each
    parameter by itself: see lab.training.piecewise.
    """
    wanted = {id(parameter) for parameter in parameters}
    groups = optimizer.param_groups
    everything = [group["params"] for group in groups]
    for group in groups:
        group["params"] = [p for p in group["params"] if id(p) in wanted]
    optimizer.param_groups = [group for group in groups if group["params"]]
    try:
        optimizer.step()
        optimizer.zero_grad()
    finally:
        optimizer.param_groups = groups
        for group, all_of_it in zip(groups, everything, strict=True):
            group["params"] = all_of_it
