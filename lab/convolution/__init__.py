"""A convolution as numbers, and the interface of the algorithms that compute it.

One signature, three passes, counted operations. The algorithms are in algorithms.py; layer.py
chooses among them.
"""

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
                f"input {list(x.shape)}, filters {list(w.shape)}, groups={groups}: do not match"
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

    def draw(
        self, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Draw an input [N, C, H, W], filters [K, C/g, R, S], and a gradient of the output."""
        group = self.of_group()
        shapes = (
            (self.batch, self.channels, *self.size),
            (self.filters, group.channels, *self.kernel),
            (self.batch, self.filters, *self.out_size),
        )
        x, w, dy = (torch.randn(shape, device=device, dtype=dtype) for shape in shapes)
        return x, w, dy

    def of_group(self) -> Problem:
        """Return the shapes of one group."""
        channels, filters = self.channels // self.groups, self.filters // self.groups
        return replace(self, channels=channels, filters=filters, groups=1)


class Unsupported(ValueError):
    """Raised for a problem that an algorithm cannot compute; the message says why."""


@dataclass(frozen=True)
class AlgorithmCost:
    """Operations and memory of one pass by an algorithm.

    Attributes:
        operations: floating-point operations executed; a complex multiply-add counts as eight.
        workspace_bytes: memory besides inputs and outputs.
    """

    operations: int
    workspace_bytes: int


class Algorithm(ABC):
    """A way to compute a convolution and its gradients, in float32.

    Subclasses see one group at a time; `compute` divides the channels.
    """

    name: str

    def refusal(self, problem: Problem, which: Pass) -> str | None:
        """Return why this pass of a problem cannot be computed; None: it can."""
        return None

    @abstractmethod
    def cost(self, problem: Problem, which: Pass) -> AlgorithmCost:
        """Return what one pass of a problem with one group costs."""

    @abstractmethod
    def forward(self, x: Tensor, w: Tensor, problem: Problem) -> Tensor:
        """Return the output [N, K, H', W'] of an input [N, C, H, W] and filters [K, C, R, S]."""

    @abstractmethod
    def backward_data(self, dy: Tensor, w: Tensor, problem: Problem) -> Tensor:
        """Return the gradient of the input from that of the output."""

    @abstractmethod
    def backward_weights(self, dy: Tensor, x: Tensor, problem: Problem) -> Tensor:
        """Return the gradient of the filters from that of the output."""

    def compute(self, which: Pass, a: Tensor, b: Tensor, problem: Problem) -> Tensor:
        """Compute a pass of all groups.

        Args:
            a, b: as of the method of that pass; filters are [K, C / groups, R, S].

        Raises:
            Unsupported: see `refusal`.
        """
        reason = self.refusal(problem, which)
        if reason:
            raise Unsupported(f"{self.name}, {which}: {reason}")
        method = getattr(self, which.replace(" ", "_"))
        groups = problem.groups
        if groups == 1:
            return method(a, b, problem)
        of_filters = 1 if which == Pass.BACKWARD_WEIGHTS else 0
        pairs = zip(a.chunk(groups, 1), b.chunk(groups, of_filters), strict=True)
        parts = [method(a, b, problem.of_group()) for a, b in pairs]
        return torch.cat(parts, 0 if which == Pass.BACKWARD_WEIGHTS else 1)

    def total(self, problem: Problem, which: Pass) -> AlgorithmCost:
        """Return the cost of one pass over all groups, which take turns with the workspace."""
        one = self.cost(problem.of_group(), which)
        return AlgorithmCost(problem.groups * one.operations, one.workspace_bytes)
