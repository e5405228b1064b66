"""Work of a model: counted operations and bytes of memory, layer by layer; without torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Line:
    """A count that grows with the batch: `fixed` + `per_sample` times its samples."""

    fixed: float
    per_sample: float

    def at(self, num_samples: int) -> float:
        """Return the count of a batch."""
        return self.fixed + self.per_sample * num_samples


@dataclass(frozen=True)
class Operation:
    """One tensor operation, such as a convolution.

    Attributes:
        flops: floating-point operations of matrix products, convolutions and attention, a
            multiply-add being two; of all other operations 0.
        num_bytes: read and written, as if no cache kept any.
        again: backward computes it again, because forward did not keep the result.
    """

    name: str
    flops: Line
    num_bytes: Line
    again: bool = False


@dataclass(frozen=True)
class LayerWork:
    """The operations of one layer, as lab.measure.layers tells layers apart.

    Attributes:
        parameters: number of values of its gradient.
    """

    name: str
    parameters: int
    forward: tuple[Operation, ...]
    backward: tuple[Operation, ...]

    @property
    def forward_flops_per_sample(self) -> float:
        """Floating-point operations of forward, for one sample."""
        return _flops(self.forward)


@dataclass(frozen=True)
class Work:
    """The operations of one training step's forward and backward, in the order of forward.

    Attributes:
        input_bytes: of one sample.
    """

    layers: tuple[LayerWork, ...]
    input_bytes: float

    @property
    def forward_flops_per_sample(self) -> float:
        """Floating-point operations of forward, for one sample."""
        return sum(layer.forward_flops_per_sample for layer in self.layers)

    @property
    def flops_per_sample(self) -> float:
        """Floating-point operations of forward and backward, for one sample, each counted once."""
        backward = _flops(op for layer in self.layers for op in layer.backward)
        return self.forward_flops_per_sample + backward

    @property
    def num_parameters(self) -> int:
        """Number of values of all gradients."""
        return sum(layer.parameters for layer in self.layers)


def _flops(operations: Iterable[Operation]) -> float:
    return sum(each.flops.per_sample for each in operations if not each.again)


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
