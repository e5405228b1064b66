"""Direction: exchanges that do the optimizer's part too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lab.distributed.comm import Comm
from lab.exchange import owners
from lab.exchange.base import Exchange, Shapes
from lab.exchange.bucket import GradBucket
from lab.exchange.hidden import Hidden, HiddenMatrices

Moments = dict[str, Tensor]  # by parameter


class Direction(Exchange):
    """An exchange that leaves in `bucket.flat` the direction of an update, no mean of gradients.

    SGD without momentum applies it, `x -= lr * (direction + weight_decay * x)`: learning rates and
    their schedule stay the optimizer's, and weight decay is decoupled, as AdamW's. What adaptive
    optimizers keep between steps, moments, is kept here, by parameter name.

    Attributes:
        kinds: of moments.
        moments: of each kind, by parameter name, as far as this rank keeps them.
        updates: steps so far, the one under way included.
    """

    exact = False
    delivers = "direction"
    takes_divided = True
    kinds: tuple[str, ...]

    def __init__(self) -> None:
        self.moments: dict[str, Moments] = {kind: {} for kind in self.kinds}
        self.updates = 0
        self._step: int | None = None  # number of the step under way

    def begin(self, bucket: GradBucket, comm: Comm) -> bool:
        """Divide a bucket's gradient by N; return whether the bucket is the first of its step.

        Shares of the gradient, and so of momentum, then add up to the mean's over the ranks.
        """
        if not bucket.divided:
            bucket.flat.div_(comm.size)
        first = bucket.step != self._step
        self._step = bucket.step
        self.updates += first
        return first

    def state_dict(self) -> dict[str, Any]:
        kinds = {kind: dict(kept) for kind, kept in self.moments.items()}
        return {"counts": {"updates": torch.tensor(self.updates)}, **kinds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.moments = {kind: copies(state[kind]) for kind in self.kinds}
        self.updates = int(state["counts"]["updates"])
        self._step = None

    def redistribute(self, states: list[dict[str, Any]], rank: int, size: int) -> dict[str, Any]:
        return {"counts": dict(states[0]["counts"])}


class MatrixDirection(Direction):
    """A direction that treats matrices between hidden layers apart, and gives the rest to Adam.

    Args:
        adam, matrices: see HiddenMatrices.
    """

    def __init__(self, adam: Sequence[str], matrices: Sequence[str]) -> None:
        super().__init__()
        self._rule = HiddenMatrices(adam, matrices)
        self._hidden: Hidden | None = None

    def look_at(self, model: nn.Module) -> None:
        self._hidden = self._rule.of(model)

    def plan(self, shapes: Shapes) -> Hidden:
        """Return the plan of the model, or of a bucket if there is no model."""
        return self._hidden or Hidden(owners.hidden_matrices(shapes))

    def moves_as(self, shapes: Shapes) -> list[tuple[int, ...]]:
        plan = self.plan(shapes)
        return [plan.matrices.get(name) or (shape.numel(),) for name, shape in shapes.items()]

    def choices(self) -> list[dict[str, Any]]:
        """Return how many parameters are matrices, and which others go by Adam and why."""
        return [self._hidden.summary()] if self._hidden else []


@dataclass(frozen=True)
class Adam:
    """The moments of Adam and the direction that they give (Kingma & Ba 2015, algorithm 1).

    Attributes:
        betas: decay rates of momentum and variance.
        eps: added to the root of the variance.

    Raises:
        ValueError: a value out of range.
    """

    betas: tuple[float, ...]
    eps: float

    def __post_init__(self) -> None:
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(
                f"exchange.betas={list(self.betas)}: must be two numbers of at least 0 and below 1"
            )
        if not 0 < self.eps < 1:
            raise ValueError(f"exchange.eps={self.eps}: must be a number above 0 and below 1")

    def correction(self, moment: int, updates: int) -> float:
        """Return the sum of the weights of `updates` gradients in momentum (0) or variance (1)."""
        return 1 - self.betas[moment] ** updates

    def add(self, gradient: Tensor, momentum: Tensor, variance: Tensor) -> None:
        """Add a gradient to its moments."""
        momentum.lerp_(gradient, 1 - self.betas[0])
        variance.mul_(self.betas[1]).addcmul_(gradient, gradient, value=1 - self.betas[1])

    def direction(self, momentum: Tensor, variance: Tensor, updates: int, out: Tensor) -> None:
        """Write the bias-corrected direction after `updates` gradients into `out`."""
        torch.sqrt(variance, out=out)
        out.div_(self.correction(1, updates) ** 0.5).add_(self.eps)
        torch.div(momentum, out, out=out).div_(self.correction(0, updates))


def is_finite(values: Tensor) -> Tensor:
    """Return whether all values are finite, bool [], without memory of their size."""
    return torch.linalg.vector_norm(values, torch.inf).isfinite()


def zeros(kept: Moments, name: str, like: Tensor) -> Tensor:
    """Return what is kept for parameter `name`: zeros like `like` at first."""
    if name not in kept:
        kept[name] = torch.zeros_like(like)
    return kept[name]


def copies(kept: Moments) -> Moments:
    """Return a copy of each tensor that is kept."""
    return {name: value.clone() for name, value in kept.items()}


def require_integer(key: str, value: object, least: int) -> None:
    """Refuse a setting of an exchange that is no integer of at least `least`.

    Raises:
        ValueError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"exchange.{key}={value}: must be an integer of at least {least}")
