"""Gradients before the update: clipping, whether they are finite, and the loss scale of fp16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lab.distributed.sharded import whole


def clip_gradients(
    model: nn.Module,
    max_norm: float,
    over_ranks: Callable[[Tensor], Tensor] = lambda norm: norm,
) -> None:
    """Scale all gradients down to the norm `max_norm`, if theirs is larger.

    Args: over_ranks: turns the norm of this rank's gradients into that of all.

    Like torch's clip_grad_norm_, except that a non-finite gradient spoils no other: if the norm is
    NaN all others become 0, as they do if it is infinite.
    """
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    if gradients:
        norm = over_ranks(nn.utils.get_total_norm(gradients))
        norm.masked_fill_(norm.isnan(), torch.inf)
        nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)


def gradients_finite(model: nn.Module, exchanged: Tensor | None) -> bool:
    """Return whether all gradients are finite. The host waits: the update depends on it.

    Args:
        exchanged: bool [], the exchange's finding; None: it did not check.
    """
    norms = torch._foreach_norm([p.grad for p in model.parameters() if p.grad is not None])
    finite = whole(torch.stack(norms).isfinite().all())
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
