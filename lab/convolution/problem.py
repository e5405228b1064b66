"""A convolution as numbers, and the interface of the algorithms that compute it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Self

import torch
from torch import Tensor

VALUE_BYTES = 4  # all algorithms compute in float32


class Pass(StrEnum):
    """One of the three computations of a layer in a training step."""

    FORWARD = "forward"
    BACKWARD_DATA = "backward data"
    BACKWARD_WEIGHTS = "backward weights"


@dataclass(frozen=True)
class Problem:
    """Shapes of one convolution.

    Attributes:
        batch: images. channels: of the input. size: height and width of the input.
        filters: channels of the output. kernel, stride, padding: (vertical, horizontal).
        groups: so many parts of the channels see only the filters of the same part.
    """

    batch: int
    channels: int
    size: tuple[int, int]
    filters: int
    kernel: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    groups: int = 1

    @classmethod
    def of(
        cls,
        x: Tensor,
        w: Tensor,
        stride: tuple[int, int] = (1, 1),
        padding: tuple[int, int] = (0, 0),
        groups: int = 1,
    ) -> Self:
        """Return the shapes of an input [N, C, H, W] and filters [K, C / groups, R, S].

        Raises:
            ValueError: they do not fit each other.
        """
        batch, channels, height, width = x.shape
        filters, of_group, *kernel = w.shape
        if channels != groups * of_group or filters % groups:
            raise ValueError(
                f"input {list(x.shape)}, filters {list(w.shape)}, groups={groups}: do not fit"
            )
        problem = cls(
            *(batch, channels, (height, width), filters, (kernel[0], kernel[1])),
            *(stride, padding, groups),
        )
        if min(problem.out_size) < 1:
            raise ValueError(f"kernel {kernel}: larger than the padded input {list(x.shape)}")
        return problem

    @property
    def padded(self) -> tuple[int, int]:
        """Height and width of the padded input."""
        return self.size[0] + 2 * self.padding[0], self.size[1] + 2 * self.padding[1]

    @property
    def out_size(self) -> tuple[int, int]:
        """Height and width of the output."""
        sides = zip(self.padded, self.kernel, self.stride, strict=True)
        height, width = ((padded - kernel) // stride + 1 for padded, kernel, stride in sides)
        return height, width

    @property
    def out_pixels(self) -> int:
        return self.out_size[0] * self.out_size[1]

    @property
    def operations(self) -> int:
        """Multiplications and additions of the definition, the same in each of the three passes.

        2·N·K·C/groups·R·S for every pixel of the output (Kim et al. 2017, slide 8).
        """
        taps = self.channels // self.groups * self.kernel[0] * self.kernel[1]
        return 2 * self.batch * self.filters * self.out_pixels * taps

    def of_group(self) -> Problem:
        """Return the shapes of one group."""
        return replace(
            self,
            channels=self.channels // self.groups,
            filters=self.filters // self.groups,
            groups=1,
        )


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
