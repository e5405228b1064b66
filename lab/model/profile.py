"""Profile of a model's layers: measured once, replayed and predicted from."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache
from typing import Any, TypeGuard, TypeVar

SLOW_FACTOR = "LAB_SLOW_FACTOR"  # environment: on this host replayed layers take longer by it
VALUE_BYTES = 4  # gradients are float32
COLUMNS = range(1024, 2049)

T = TypeVar("T")


@dataclass(frozen=True)
class Layer:
    """One layer's time and parameters.

    Attributes:
        name: letters, digits and _.
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
        if not node:
            raise ValueError("profile=none: must be one, a file of conf/profile")
        where = f"profile={node.get('name') if isinstance(node, Mapping) else node}"
        profile = _make(cls, node, where)
        if not isinstance(profile.layers, Sequence) or isinstance(profile.layers, str):
            raise ValueError(f"{where}: layers={profile.layers}: must be a list")
        layers = tuple(
            _make(Layer, layer, f"{where}: layers[{index}]")
            for index, layer in enumerate(profile.layers)
        )
        _check_profile(where, profile, layers)
        return replace(profile, layers=layers)

    def to_yaml(self) -> str:
        """Write the text of a file that `parse` reads."""
        head = f"name: {self.name}\nsource: {json.dumps(self.source)}\n"
        head += f"reference_batch: {self.reference_batch}\nbytes_scale: {self.bytes_scale}\n"
        return head + "layers:\n" + "".join(f"  - {_flow(layer)}\n" for layer in self.layers)

    def scaled(self, bytes_scale: float = 1.0, time_scale: float = 1.0) -> Profile:
        """The same model with more or fewer values, or on a slower or faster device.

        Args:
            bytes_scale: what the profile's own is multiplied by.
            time_scale: what all times are multiplied by.
        """

        def slower(layer: Layer) -> Layer:
            keys = (*TIMES, *FIXED_TIMES)
            return replace(layer, **{key: getattr(layer, key) * time_scale for key in keys})

        layers = tuple(map(slower, self.layers))
        return replace(self, layers=layers, bytes_scale=self.bytes_scale * bytes_scale)

    def forward_s(self, layer: Layer, per_rank_batch_size: int) -> float:
        """Seconds of one layer's forward pass over a rank's batch."""
        return self._scaled(layer.forward_ms, layer.fixed_forward_ms, per_rank_batch_size)

    def backward_s(self, layer: Layer, per_rank_batch_size: int) -> float:
        """Seconds of one layer's backward pass over a rank's batch."""
        return self._scaled(layer.backward_ms, layer.fixed_backward_ms, per_rank_batch_size)

    def compute_s(self, per_rank_batch_size: int) -> float:
        """Seconds of forward and backward over a rank's batch."""
        each = (
            self.forward_s(layer, per_rank_batch_size) + self.backward_s(layer, per_rank_batch_size)
            for layer in self.layers
        )
        return sum(each)

    def values(self, layer: Layer) -> int:
        """float32 values of one layer's gradient, scaled."""
        return round(layer.parameters * self.bytes_scale)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all gradients, scaled."""
        return VALUE_BYTES * sum(self.values(layer) for layer in self.layers)

    def _scaled(self, whole_ms: float, fixed_ms: float, per_rank_batch_size: int) -> float:
        return (
            fixed_ms + (whole_ms - fixed_ms) * per_rank_batch_size / self.reference_batch
        ) / 1000


def replayed(settings: Mapping[str, Any]) -> Profile | None:
    """The profile that a run of these composed settings replays; None if its model is a real one.

    Raises:
        ValueError: a value of it is out of range.
    """
    model = settings["model"]
    if "profile" not in model:
        return None
    return Profile.parse(settings["profile"]).scaled(model["bytes_scale"], model["time_scale"])


def _flow(layer: Layer) -> str:
    times = (f"{key}: {getattr(layer, key):.4f}" for key in (*TIMES, *FIXED_TIMES))
    name = json.dumps(layer.name)  # quoted: a layer may be called 1, or on
    return f"{{name: {name}, parameters: {layer.parameters}, {', '.join(times)}}}"


TIMES = ("forward_ms", "backward_ms")
FIXED_TIMES = tuple(f"fixed_{key}" for key in TIMES)


def _make(kind: type[T], node: Any, where: str) -> T:
    """A dataclass with the attributes that `node` gives it, which are exactly those it has."""
    required = {field.name: field.default is MISSING for field in fields(kind)}  # type: ignore[arg-type]
    if not isinstance(node, Mapping):
        raise ValueError(f"{where}: must have the keys {', '.join(required)}")
    for key in node:
        if key not in required:
            raise ValueError(f"{where}: {key}: no such key; allowed are {', '.join(required)}")
    for key, is_required in required.items():
        if is_required and node.get(key) is None:
            raise ValueError(f"{where}: {key}: is missing")
    return kind(**node)


def _check_profile(where: str, profile: Profile, layers: tuple[Layer, ...]) -> None:
    if not layers:
        raise ValueError(f"{where}: layers=[]: must have at least one")
    require_positive(f"{where}: bytes_scale", profile.bytes_scale)
    batch = profile.reference_batch
    if not _is_whole(batch) or batch < 1:
        raise ValueError(f"{where}: reference_batch={batch}: must be an integer of at least 1")
    for index, layer in enumerate(layers):
        if not isinstance(layer.name, str) or not re.fullmatch(r"\w+", layer.name):
            raise ValueError(
                f"{where}: layers[{index}].name={layer.name}: allowed are letters, digits and _"
            )
        if layer.name in {other.name for other in layers[:index]}:
            raise ValueError(f"{where}: layers[{index}].name={layer.name}: is there twice")
        _check_layer(f"{where}: {layer.name}", layer)


def _check_layer(where: str, layer: Layer) -> None:
    if not _is_whole(layer.parameters) or layer.parameters < 0:
        raise ValueError(f"{where}.parameters={layer.parameters}: must be an integer of at least 0")
    for key, fixed_key in zip(TIMES, FIXED_TIMES, strict=True):
        whole, fixed = getattr(layer, key), getattr(layer, fixed_key)
        if not _is_number(whole) or whole < 0:
            raise ValueError(f"{where}.{key}={whole}: must be a number of at least 0")
        if not _is_number(fixed) or not 0 <= fixed <= whole:
            raise ValueError(f"{where}.{fixed_key}={fixed}: must be from 0 to {key}={whole}")


def require_positive(key: str, value: object) -> None:
    """Refuse what is not a number above 0.

    Raises:
        ValueError: names the key.
    """
    if not _is_number(value) or value <= 0:
        raise ValueError(f"{key}={value}: must be a number above 0")


def _is_number(value: object) -> TypeGuard[float]:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value)


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def shapes(values: int) -> dict[str, tuple[int, ...]]:
    """Parameters that stand for a layer of so many values, by name; a profile knows no shapes.

    A weight [rows, columns], with of 1024 to 2048 columns the number that leaves the fewest values
    over: as in an FC layer, whose rows 1-bit SGD quantises. Those left over are a bias. A layer of
    fewer than 1024 values is a bias alone.
    """
    rows, rest = divmod(values, columns := _columns(values))
    weight = {"weight": (rows, columns)} if rows else {}
    return weight | ({"bias": (rest,)} if rest else {})


@cache  # a fit asks the same of the same few layers thousands of times
def _columns(values: int) -> int:
    return min(COLUMNS, key=lambda columns: values % columns)
