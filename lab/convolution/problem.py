"""A convolution as numbers: what is asked, whichever algorithm computes it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Self

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
