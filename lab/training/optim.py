"""SGD, its learning rate over time, and the loss scale of fp16."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

SCHEDULES = ("constant", "cosine")


class Optim:
    """SGD with momentum, and a learning rate that is a function of the step alone.

    Args:
        lr: peak learning rate.
        momentum, weight_decay, nesterov: as torch.optim.SGD.
        schedule: "constant", or "cosine" down to 0 at the last step (Loshchilov and Hutter, 2017).
        warmup_steps: steps of linear growth to `lr` (Goyal et al. 2017, section 2.2).
        linear_scaling: multiply the rate by batch_size / base_batch_size (section 2.1).
        base_batch_size: the global batch for which `lr` was chosen.
        batch_size: global batch of this run.

    Raises:
        ValueError: an argument out of range.
    """

    def __init__(
        self,
        *,
        lr: float,
        momentum: float,
        weight_decay: float,
        nesterov: bool,
        schedule: str,
        warmup_steps: int,
        linear_scaling: bool,
        base_batch_size: int,
        batch_size: int,
    ) -> None:
        if schedule not in SCHEDULES:
            raise ValueError(f"optim.schedule={schedule}: allowed are {', '.join(SCHEDULES)}")
        for name, value in (("lr", lr), ("momentum", momentum), ("weight_decay", weight_decay)):
            if (
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or not 0 <= value < math.inf
            ):
                raise ValueError(f"optim.{name}={value}: must be a number of at least 0")
        for name, value, least in (
            ("warmup_steps", warmup_steps, 0),
            ("base_batch_size", base_batch_size, 1),
        ):
            if not isinstance(value, int) or value < least:
                raise ValueError(f"optim.{name}={value}: must be an integer of at least {least}")
        for name, value in (("nesterov", nesterov), ("linear_scaling", linear_scaling)):
            if not isinstance(value, bool):
                raise ValueError(f"optim.{name}={value}: must be true or false")
        if nesterov and not momentum:
            raise ValueError("optim.nesterov=true: needs optim.momentum above 0")
        self.peak_lr = lr * batch_size / base_batch_size if linear_scaling else lr
        self.momentum = momentum
        self.weight_decay = weight_decay
        self.nesterov = nesterov
        self.schedule = schedule
        self.warmup_steps = warmup_steps

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer of `model`: one fused pass over all parameters."""
        return torch.optim.SGD(
            [parameter for parameter in model.parameters() if parameter.requires_grad],
            lr=self.peak_lr,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            nesterov=self.nesterov,
            fused=True,
        )

    def prepare(self, optimizer: torch.optim.Optimizer, step: int, total_steps: int) -> None:
        """Set the hyperparameters of `step`. This run's settings hold after a resume too."""
        for group in optimizer.param_groups:
            group["lr"] = self.lr_at(step, total_steps)
            group["momentum"] = self.momentum
            group["weight_decay"] = self.weight_decay
            group["nesterov"] = self.nesterov

    def lr_at(self, step: int, total_steps: int) -> float:
        """Return the learning rate of step `step` of `total_steps`, counted from 0."""
        if step < self.warmup_steps:
            return self.peak_lr * (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return self.peak_lr
        done = (step - self.warmup_steps) / max(1, total_steps - self.warmup_steps)
        return self.peak_lr * (1 + math.cos(math.pi * done)) / 2


def clip_gradients(model: nn.Module, max_norm: float) -> None:
    """Scale all gradients down to the norm `max_norm`, if theirs is larger.

    Like torch's clip_grad_norm_, except that a non-finite gradient spoils no other: if the norm is
    NaN all others become 0, as they do if it is infinite.
    """
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    if gradients:
        norm = nn.utils.get_total_norm(gradients)
        norm.masked_fill_(norm.isnan(), torch.inf)
        nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)


def gradients_finite(model: nn.Module, exchanged: Tensor | None) -> bool:
    """Return whether all gradients are finite. The host waits: the update depends on it.

    Args:
        exchanged: bool [], the exchange's finding; None: it did not check.
    """
    norms = torch._foreach_norm([p.grad for p in model.parameters() if p.grad is not None])
    finite = torch.stack(norms).isfinite().all()
    return bool(finite if exchanged is None else finite & exchanged)


class LossScale:
    """Dynamic loss scaling (Micikevicius et al. 2018, section 3.2).

    The scale is equal on all ranks: it depends only on whether the averaged gradient was finite,
    which all ranks see.
    """

    INITIAL, GROW_EVERY, LEAST = 2.0**16, 2000, 1.0

    def __init__(self) -> None:
        self.value = self.INITIAL
        self._good_steps = 0

    def update(self, finite: bool) -> None:
        """Halve the scale after a step that overflowed; double it after many that did not.

        Raises:
            FloatingPointError: the gradient is not finite at the smallest scale either.
        """
        if not finite:
            self._good_steps = 0
            self.value /= 2
            if self.value < self.LEAST:
                raise FloatingPointError("precision=fp16: gradient not finite at loss scale 1")
            return
        self._good_steps += 1
        if self._good_steps % self.GROW_EVERY == 0:
            self.value *= 2

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "good_steps": self._good_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value, self._good_steps = state["value"], state["good_steps"]
