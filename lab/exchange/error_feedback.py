"""Error feedback: keep the compression error, and add it to the next gradient."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lab.distributed.comm import Comm
from lab.exchange.base import Exchange, Kept, Ranks, Shapes
from lab.exchange.bucket import GradBucket


class ErrorFeedback(Exchange):
    """Sends a part of gradient + residual, and keeps the rest as the new residual.

    So, summed over the ranks, delivered + residuals = true gradients at any time (Seide et al.
    2014, section 3; Karimireddy et al. 2019, Algorithm 2). A non-finite gradient spoils the
    residual too: the run fails, or the trainer restores the state.

    Args:
        error_feedback: False drops the compression error, to show what that costs.

    Raises:
        ValueError: `error_feedback` is not a bool.
    """

    exact = False

    def __init__(self, error_feedback: bool) -> None:
        if not isinstance(error_feedback, bool):
            raise ValueError(f"exchange.error_feedback={error_feedback}: must be true or false")
        self.error_feedback = error_feedback
        self.residual: dict[str, Tensor] = {}  # [values] by parameter

    @property
    def keeps_residuals(self) -> bool:
        return self.error_feedback

    def residual_of(self, name: str, gradient: Tensor) -> Tensor | None:
        """Return parameter `name`'s residual, zeros at first, to be replaced by the caller.

        None without error feedback.

        Args:
            gradient: float32 [values].
        """
        if self.error_feedback and name not in self.residual:
            self.residual[name] = torch.zeros_like(gradient)
        return self.residual.get(name)

    def add_residual(self, bucket: GradBucket, comm: Ranks) -> None:
        for name, start, stop in bucket.spans():
            if name in self.residual:
                bucket.flat[start:stop] += record_stream(self.residual[name])

    def flush_residual(self, bucket: GradBucket, comm: Ranks) -> None:
        self.add_residual(bucket, comm)
        for name in bucket.shapes:
            self.residual.pop(name, None)

    def kept(self, shapes: Shapes, comm: Comm) -> Iterator[Kept]:
        for name, values in self.residual.items():
            yield name, 0, values.view(-1)

    def error_bound(self, largest: float, size: int) -> float:
        return 0.0 if self.error_feedback else math.inf

    def state_dict(self) -> dict[str, Any]:
        return {"residual": dict(self.residual)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.residual = {name: value.clone() for name, value in state["residual"].items()}

    def redistribute(self, states: list[dict[str, Any]], rank: int, size: int) -> dict[str, Any]:
        """Give each new rank an equal share of the residuals' sum, so that the sum stays."""
        return {"residual": shares([state["residual"] for state in states], size)}


def record_stream(residual: Tensor) -> Tensor:
    """Return `residual`, kept in memory until the current stream has read it.

    Exchanges run on a side stream, but a residual from a checkpoint or a rollback was allocated on
    the main one, which would otherwise reuse its memory before the side stream has read it.
    """
    if residual.is_cuda:
        residual.record_stream(torch.cuda.current_stream(residual.device))
    return residual


def shares(kept: list[dict[str, Tensor]], size: int) -> dict[str, Tensor]:
    """Return an equal share for each of `size` ranks of what others kept, by parameter."""
    return {name: _share([tensors[name] for tensors in kept], size) for name in kept[0]}


def _share(tensors: list[Tensor], size: int) -> Tensor:
    total = tensors[0].double()
    for other in tensors[1:]:
        total += other
    return total.div_(size).float()
