"""What each layer of a model costs: the seam between measuring, replaying and predicting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

VALUE_BYTES = 4  # gradients are float32
COLUMNS = range(1024, 2049)


@dataclass(frozen=True)
class Layer:
    """One layer's time and parameters.

    Attributes:
        parameters: number of float32 values.
        forward_ms, backward_ms: at the profile's reference batch.
        fixed_forward_ms, fixed_backward_ms: the part of these that no batch size changes.
    """

    name: str
    parameters: int
    forward_ms: float
    backward_ms: float
    fixed_forward_ms: float = 0.0
    fixed_backward_ms: float = 0.0


@dataclass(frozen=True)
class Profile:
    """A model on a device, layer by layer, in the order of forward.

    Attributes:
        name: as in conf/profile.
        source: where the figures come from.
        reference_batch: images per rank at which they were taken.
        bytes_scale: what parameters are multiplied by, so that a slow link keeps the ratio of
            compute to communication.
    """

    name: str
    source: str
    reference_batch: int
    layers: tuple[Layer, ...]
    bytes_scale: float = 1.0

    @classmethod
    def parse(cls, node: Mapping[str, Any]) -> Profile:
        """The profile that a file of conf/profile holds.

        Raises:
            ValueError: a value that is missing, unknown or out of range.
        """
        try:
            layers = tuple(Layer(**layer) for layer in node["layers"])
            profile = cls(**{**node, "layers": layers})
        except (KeyError, TypeError) as error:
            raise ValueError(f"profile={node.get('name')}: {error}") from None
        if not layers:
            raise ValueError(f"profile={profile.name}: has no layers")
        profile._check("reference_batch", profile.reference_batch, above=0)
        profile._check("bytes_scale", profile.bytes_scale, above=0)
        for layer in layers:
            for key in ("parameters", "fixed_forward_ms", "fixed_backward_ms"):
                profile._check(f"{layer.name}.{key}", getattr(layer, key))
            for way in ("forward_ms", "backward_ms"):
                fixed = getattr(layer, f"fixed_{way}")
                profile._check(f"{layer.name}.{way}", getattr(layer, way) - fixed)
        return profile

    def forward_s(self, layer: Layer, batch: int) -> float:
        """Seconds of one layer's forward pass over `batch` images of one rank."""
        return self._scaled(layer.forward_ms, layer.fixed_forward_ms, batch)

    def backward_s(self, layer: Layer, batch: int) -> float:
        """Seconds of one layer's backward pass over `batch` images of one rank."""
        return self._scaled(layer.backward_ms, layer.fixed_backward_ms, batch)

    def compute_s(self, batch: int) -> float:
        """Seconds of forward and backward over `batch` images of one rank."""
        each = (
            self.forward_s(layer, batch) + self.backward_s(layer, batch) for layer in self.layers
        )
        return sum(each)

    def values(self, layer: Layer) -> int:
        """float32 values of one layer's gradient, scaled."""
        return round(layer.parameters * self.bytes_scale)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all gradients, scaled."""
        return VALUE_BYTES * sum(self.values(layer) for layer in self.layers)

    def _scaled(self, whole_ms: float, fixed_ms: float, batch: int) -> float:
        return (fixed_ms + (whole_ms - fixed_ms) * batch / self.reference_batch) / 1000

    def _check(self, key: str, value: float, above: float | None = None) -> None:
        if (
            not isinstance(value, int | float)
            or value < 0
            or (above is not None and value <= above)
        ):
            allowed = "above 0" if above is not None else "at least 0 (and its fixed part no more)"
            raise ValueError(f"profile={self.name}: {key}={value}: must be {allowed}")


def shapes(values: int) -> dict[str, tuple[int, ...]]:
    """Parameters that stand for a layer of so many values, by name; a profile knows no shapes.

    A weight [rows, columns], with of 1024 to 2048 columns the number that leaves the fewest values
    over: as in an FC layer, whose rows 1-bit SGD quantises. Those left over are a bias. A layer of
    fewer than 1024 values is a bias alone.
    """
    columns = min(COLUMNS, key=lambda columns: values % columns)
    rows, rest = divmod(values, columns)
    weight = {"weight": (rows, columns)} if rows else {}
    return weight | ({"bias": (rest,)} if rest else {})
