"""Counts of a network, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Counts:
    """Counts of a network's parameters and operations.

    Attributes:
        parameters: of all layers.
        fully_connected: parameters of fully connected layers; None if kinds of layers are unknown.
        operations: multiplications and additions of the forward pass over one image, by layer:
            conv1, conv2, …, and numbered on, fc6, …; empty if unknown.
    """

    parameters: int
    fully_connected: int | None
    operations: Mapping[str, int] = field(default_factory=dict[str, int])
