"""Counts of a network's parameters and operations from shapes alone, without torch."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Parameters:
    """Number of parameters of a model.

    Attributes:
        total: parameters of all layers. fully_connected: those of fully connected layers; None if
        kinds of layers are unknown.
    """

    total: int
    fully_connected: int | None


@dataclass(frozen=True)
class Convolution:
    """Shape of a two-dimensional convolution.

    Attributes:
        height, width: of the output, in pixels.
        kernel_height, kernel_width: of the filter, in pixels.
        groups: number of parts of the channels; each output channel depends on one part.

    Raises:
        ValueError: a value is not an integer of at least 1, or groups do not divide the channels.
    """

    in_channels: int
    out_channels: int
    height: int
    width: int
    kernel_height: int
    kernel_width: int
    groups: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{field.name}={value}: must be an integer of at least 1")
        if self.in_channels % self.groups or self.out_channels % self.groups:
            raise ValueError(f"groups={self.groups}: must divide in_channels and out_channels")

    @property
    def operations(self) -> int:
        """Multiplications and additions of the forward pass over one image, without the bias."""
        weights = self.kernel_height * self.kernel_width * self.in_channels // self.groups
        return 2 * weights * self.out_channels * self.height * self.width
