"""Layers under a roofline: how fast each could be, by its operations and bytes, and how fast it is.

(S. Williams, A. Waterman and D. Patterson, Roofline: An Insightful Visual Performance Model,
Communications of the ACM 52(4), 2009.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lab.model.profile import Layer
from lab.model.work import Operation, Work


@dataclass(frozen=True)
class Roofs:
    """Highest rates of a device.

    Attributes:
        flops_per_s: of products. bytes_per_s: of copies, by the bytes that one moves: the largest
            go to memory, the others to a cache.
    """

    flops_per_s: float
    bytes_per_s: Mapping[int, float]
    source: str

    @property
    def memory_bytes_per_s(self) -> float:
        """The rate of the largest copies."""
        return self.bytes_per_s[max(self.bytes_per_s)]


@dataclass(frozen=True)
class Spot:
    """Forward or backward of one layer.

    Attributes:
        flops, num_bytes: counted; bytes as if no cache kept any.
        seconds: measured.
        loose_bytes: of these, moved by operations without products, such as ReLU and pooling:
            fused into the product before them, they would not go to memory.
    """

    layer: str
    way: str
    flops: float
    num_bytes: float
    seconds: float
    loose_bytes: float

    def bound_s(self, roofs: Roofs) -> tuple[float, float]:
        """Return the least seconds that products and memory take."""
        return self.flops / roofs.flops_per_s, self.num_bytes / roofs.memory_bytes_per_s


def spots(work: Work, layers: Iterable[Layer], batch: int) -> list[Spot]:
    """Join counted work and measured times of the same layers.

    Args:
        layers: measured at `batch`, in any order.
    """
    measured = {layer.name: layer for layer in layers}
    found = []
    for counted in work.layers:
        layer = measured[counted.name]
        for way, operations, took_ms in (
            ("forward", counted.forward, layer.forward_ms),
            ("backward", counted.backward, layer.backward_ms),
        ):
            found.append(_spot(counted.name, way, operations, took_ms / 1000, batch))
    return found


def _spot(
    layer: str, way: str, operations: tuple[Operation, ...], seconds: float, batch: int
) -> Spot:
    flops = sum(each.flops.at(batch) for each in operations)
    num_bytes = sum(each.num_bytes.at(batch) for each in operations)
    loose = sum(each.num_bytes.at(batch) for each in operations if not each.flops.at(batch))
    return Spot(layer, way, flops, num_bytes, seconds, loose if flops else 0.0)
