"""Optimizers of a user's own, named by `_target_` in tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR


class SignDescent(Optimizer):
    """Moves each weight by lr in the direction of its gradient's sign.

    It counts its steps in its groups, as some optimizers do.
    """

    def __init__(self, params: Iterable[Tensor], lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "count": 0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all weights that have a gradient."""
        for group in self.param_groups:
            group["count"] += 1
            for weight in group["params"]:
                if weight.grad is not None:
                    weight.mul_(1 - group["lr"] * group["weight_decay"])
                    weight.sub_(group["lr"] * weight.grad.sign())


class InFloat64(SGD):
    """SGD by the sum of all gradients so far, in float64."""

    def step(self, closure: None = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["total"] = state.get("total", 0.0) + parameter.grad.double()
            parameter.grad = state["total"].float()
        super().step()


class Scaled(SGD):
    """SGD over the norm of all gradients so far, which it keeps for all parameters."""

    def step(self, closure: None = None) -> None:
        gradients = [p.grad for p in self.param_groups[0]["params"]]
        shared: Any = self.state
        total = shared["all"] = dict(shared["all"])
        total["total"] = total.get("total", 0.0) + nn.utils.get_total_norm(gradients)
        for gradient in gradients:
            gradient /= total["total"]
        super().step()


class Forgets(SGD):
    """SGD whose rate falls with a number of steps that no state holds."""

    count = 0

    def step(self, closure: None = None) -> None:
        self.count += 1
        for parameter in self.param_groups[0]["params"]:
            parameter.grad /= self.count
        super().step()


class WithArrays(SGD):
    """SGD that keeps what a checkpoint does not hold."""

    def step(self, closure: None = None) -> None:
        super().step()
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["array"] = parameter.detach().numpy().copy()


class Broken(SGD):
    """SGD whose constructor has a bug."""

    def __init__(self, params: Iterable[Tensor], lr: float = 0.1) -> None:
        super().__init__(params, lr=lr + None)  # type: ignore[operator]


def two_rates(params: Iterable[Tensor], lr: float = 0.1, **others: Any) -> Optimizer:
    """Make AdamW, with half of the rate for vectors."""
    every = [*params]
    groups = [
        {"params": [p for p in every if p.dim() > 1]},
        {"params": [p for p in every if p.dim() < 2], "lr": lr / 2},
    ]
    return AdamW(groups, lr=lr, **others)


def with_a_scheduler(params: Iterable[Tensor], lr: float = 0.1) -> Optimizer:
    """Make SGD whose rate a scheduler of torch would change."""
    optimizer = SGD(params, lr=lr)
    StepLR(optimizer, step_size=1)
    return optimizer


def not_one(params: Iterable[Tensor], lr: float = 0.1) -> list[Tensor]:
    """Return no optimizer."""
    return [*params]


class TrustAll(SGD):
    """Scales each step by the norm of all gradients together, as LAMB over all would."""

    def step(self, closure: None = None) -> None:
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        total = nn.utils.get_total_norm([g for g in gradients if g is not None])
        for gradient in gradients:
            if gradient is not None:
                gradient /= total
        super().step()


class Counting(SGD):
    """Decays its rate by its own count of steps, which it keeps for a whole group."""

    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            group["lr"] = 0.1 / group["count"]
        super().step()


class Failing(SGD):
    """Wants all parameters at each step."""

    def step(self, closure: None = None) -> None:
        if len(self.param_groups[0]["params"]) < 2:
            raise RuntimeError("where are the others?")
