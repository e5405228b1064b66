"""The interface of an algorithm: three passes, what they cost, and what it refuses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from lab.convolution.problem import Pass, Problem


class Unsupported(ValueError):
    """Raised for a problem that an algorithm cannot compute; the message says why."""


@dataclass(frozen=True)
class Cost:
    """Operations and memory of one pass by an algorithm.

    Attributes:
        operations: floating-point operations executed; a complex multiply-add counts as eight.
        workspace_bytes: memory besides inputs and outputs.
    """

    operations: int
    workspace_bytes: int


class Algorithm(ABC):
    """A way to compute a convolution and its gradients, in float32.

    Subclasses see one group at a time; `forward` and its siblings divide the channels.
    """

    name: str

    def refusal(self, problem: Problem, which: Pass) -> str | None:
        """Return why this pass of a problem cannot be computed; None: it can."""
        return None

    @abstractmethod
    def cost(self, problem: Problem, which: Pass) -> Cost:
        """Return what one pass of a problem with one group costs."""

    @abstractmethod
    def _forward(self, x: Tensor, w: Tensor, problem: Problem) -> Tensor: ...

    @abstractmethod
    def _backward_data(self, dy: Tensor, w: Tensor, problem: Problem) -> Tensor: ...

    @abstractmethod
    def _backward_weights(self, dy: Tensor, x: Tensor, problem: Problem) -> Tensor: ...

    def forward(self, x: Tensor, w: Tensor, problem: Problem) -> Tensor:
        """Return the output [N, K, H', W'] of an input [N, C, H, W] and filters [K, C/g, R, S].

        Raises:
            Unsupported: see `refusal`; as the other passes.
        """
        self._check(problem, Pass.FORWARD)
        one = problem.of_group()
        pairs = zip(x.chunk(problem.groups, 1), w.chunk(problem.groups), strict=True)
        return _joined([self._forward(x, w, one) for x, w in pairs], 1)

    def backward_data(self, dy: Tensor, w: Tensor, problem: Problem) -> Tensor:
        """Return the gradient of the input from that of the output."""
        self._check(problem, Pass.BACKWARD_DATA)
        one = problem.of_group()
        pairs = zip(dy.chunk(problem.groups, 1), w.chunk(problem.groups), strict=True)
        return _joined([self._backward_data(dy, w, one) for dy, w in pairs], 1)

    def backward_weights(self, dy: Tensor, x: Tensor, problem: Problem) -> Tensor:
        """Return the gradient of the filters from that of the output."""
        self._check(problem, Pass.BACKWARD_WEIGHTS)
        one = problem.of_group()
        pairs = zip(dy.chunk(problem.groups, 1), x.chunk(problem.groups, 1), strict=True)
        return _joined([self._backward_weights(dy, x, one) for dy, x in pairs], 0)

    def total(self, problem: Problem, which: Pass) -> Cost:
        """Return the cost of one pass over all groups, which take turns with the workspace."""
        one = self.cost(problem.of_group(), which)
        return Cost(problem.groups * one.operations, one.workspace_bytes)

    def _check(self, problem: Problem, which: Pass) -> None:
        reason = self.refusal(problem, which)
        if reason:
            raise Unsupported(f"{self.name}, {which}: {reason}")


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
