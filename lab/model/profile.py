"""Profile of a model's layers: measured once, then replayed or used for predictions."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache, partial
from typing import Annotated, Any

from lab.settings import checks
from lab.settings.checks import AtLeast0, AtLeast1, Count, made
from lab.settings.storage import mapped

SLOW_FACTOR = "LAB_SLOW_FACTOR"  # environment: factor on replayed layers' times on this host
VALUE_BYTES = 4  # gradients are float32
MOST_SCALE = 1e6
COLUMNS = range(1024, 2049)
# Names in the lines through a layer's times at several batches, and the ends of their intervals.
ALL, REST = "(all layers)", "(rest)"
BOTH, STEP = "forward and backward", "step"
ENDS = ("median", "low", "high")
Interval = dict[str, float | None]


@dataclass(frozen=True)
class BatchFit:
    """The line time = fixed + per sample · batch of a layer, with 95 % intervals.

    Attributes:
        layer: its name; ALL for their sum, REST for what they leave of the step.
        way: forward or backward; of ALL it is BOTH, of REST it is STEP.
        fixed_ms, per_sample_ms: median, low and high; the ends are None after too few rounds.
    """

    layer: str
    way: str
    fixed_ms: Interval
    per_sample_ms: Interval

    def scaled(self, factor: float) -> BatchFit:
        """Return the line of a device whose times are `factor` times as long."""

        def slower(times: Interval) -> Interval:
            return {key: value and factor * value for key, value in times.items()}

        return replace(
            self, fixed_ms=slower(self.fixed_ms), per_sample_ms=slower(self.per_sample_ms)
        )


@dataclass(frozen=True)
class Layer:
    """One layer's time and parameters.

    Attributes:
        name: letters, digits and _.
        parameters: number of float32 values.
        forward_ms, backward_ms: at the profile's reference batch.
        fixed_forward_ms, fixed_backward_ms: the part that does not depend on the batch size.
    """

    name: str
    parameters: Annotated[int, partial(checks.integer, at_least=0)]
    forward_ms: AtLeast0
    backward_ms: AtLeast0
    fixed_forward_ms: float = 0.0
    fixed_backward_ms: float = 0.0


@dataclass(frozen=True)
class Profile:
    """A model on a device, layer by layer, in the order of forward.

    Attributes:
        name: as in conf/profile.
        source: origin of the figures. reference_batch: samples per rank at which they were
        measured. bytes_scale: factor on parameters, which keeps the ratio of compute to
        communication on a slow link. fixed_share: assumed range of the share of all times that
        does not depend on the batch size, where no layer gives it; None: nothing is assumed.
        rest_ms: time of a step besides its layers (optimizer, data, host) at the reference batch,
        and fixed_rest_ms the part that does not depend on the batch size; None: unknown.
        update_bytes_per_s: rate at which the optimizer passes over memory, where `rest_ms` has no
        update; None: these times contain one.
        update_passes: what that one reads and writes of each value; None: assumed to be SGD's.
        step_ms: of a whole step without any clock on its layers, of which these are parts.
        num_threads: threads that computed, on CPU cores that ranks of one machine share; None: a
        device of the rank's own.
        num_kernels: operations that forward and backward launch; None: not counted.
        fits: lines over several batches that gave the times, with their intervals; none: not known.
    """

    name: str
    source: str
    reference_batch: Count
    layers: Annotated[tuple[Layer, ...], checks.listed]
    bytes_scale: Annotated[float, partial(checks.number, above=0, at_most=MOST_SCALE)] = 1.0
    fixed_share: Annotated[tuple[float, float], _check_share] | None = None
    rest_ms: AtLeast0 | None = None
    fixed_rest_ms: float = 0.0
    step_ms: AtLeast0 | None = None
    update_bytes_per_s: AtLeast1 | None = None
    update_passes: AtLeast0 | None = None
    num_threads: Count | None = None
    num_kernels: Count | None = None
    fits: Annotated[tuple[BatchFit, ...], checks.listed] = ()

    @classmethod
    def parse(cls, node: Mapping[str, Any]) -> Profile:
        """Parse the content of a file of conf/profile.

        Raises:
            ValueError: a value is missing, unknown or out of range.
        """
        if not node:
            raise ValueError("profile=none: must be a file in conf/profile")
        where = f"profile={node.get('name') if isinstance(node, Mapping) else node}"
        profile = made(cls, node, f"{where}: ")
        layers = tuple(
            made(Layer, layer, f"{where}: layers[{index}].")
            for index, layer in enumerate(profile.layers)
        )
        _check_profile(where, profile, layers)
        share = profile.fixed_share and (profile.fixed_share[0], profile.fixed_share[1])
        fits = tuple(_fit_of(f"{where}: fits[{i}]", each) for i, each in enumerate(profile.fits))
        return replace(profile, layers=layers, fixed_share=share, fits=fits)

    @property
    def is_open(self) -> bool:
        """Whether the part of its times that is fixed is known only to lie in a range."""
        return self.drawn(0.0) != self.drawn(1.0)

    def drawn(self, place: float) -> Profile:
        """Return the profile with its fixed part at `place`, from 0 to 1, of what it may be.

        That is `fixed_share`, or the interval of the fit of all layers together. Times at the
        reference batch stay; each layer's fixed part moves by the same share of its time.
        """
        whole_ms = 1000 * self.compute_s(self.reference_batch)
        if (ends := self._fixed_ends_ms(whole_ms)) is None or not whole_ms:
            return self
        low_ms, high_ms = ends
        known_ms = sum(getattr(layer, key) for layer in self.layers for key in FIXED_TIMES)
        share = (low_ms + place * (high_ms - low_ms) - known_ms) / whole_ms

        def moved(layer: Layer) -> Layer:
            parts = dict[str, float]()
            for key, fixed_key in zip(TIMES, FIXED_TIMES, strict=True):
                whole, fixed = getattr(layer, key), getattr(layer, fixed_key)
                parts[fixed_key] = min(max(0.0, fixed + share * whole), whole)
            return replace(layer, **parts)

        return replace(self, layers=tuple(map(moved, self.layers)), fixed_share=None, fits=())

    def _fixed_ends_ms(self, whole_ms: float) -> tuple[float, float] | None:
        """Return the least and the most that may be fixed of all layers' time `whole_ms`."""
        for fit in self.fits:
            low, high = fit.fixed_ms["low"], fit.fixed_ms["high"]
            if fit.layer == ALL and low is not None and high is not None:
                return low, high
        return self.fixed_share and (self.fixed_share[0] * whole_ms, self.fixed_share[1] * whole_ms)

    def to_yaml(self) -> str:
        """Return the text of a file that `parse` reads."""
        import yaml  # imported here, as only who writes a file needs it

        content = {key: value for key, value in asdict(self).items() if value not in (None, ())}
        for key in ("layers", "fits"):  # they come last
            content |= {key: list(content.pop(key))} if key in content else {}
        written = mapped(content, _rounded)
        return yaml.safe_dump(written, sort_keys=False, default_flow_style=None, width=math.inf)

    def scaled(self, bytes_scale: float = 1.0, time_scale: float = 1.0) -> Profile:
        """Return the same model with more or fewer values, or on a slower or faster device.

        Args: bytes_scale: factor on the profile's `bytes_scale`. time_scale: factor on all times.
        """
        whole = {key: getattr(self, key) for key in ("rest_ms", "fixed_rest_ms", "step_ms")}
        slow = {key: value and value * time_scale for key, value in whole.items()}

        def slower(layer: Layer) -> Layer:
            keys = (*TIMES, *FIXED_TIMES)
            return replace(layer, **{key: getattr(layer, key) * time_scale for key in keys})

        layers = tuple(map(slower, self.layers))
        fits = tuple(fit.scaled(time_scale) for fit in self.fits)
        scale = self.bytes_scale * bytes_scale
        rate = self.update_bytes_per_s
        if rate is not None:
            slow["update_bytes_per_s"] = rate / time_scale if time_scale else math.inf
        return replace(self, layers=layers, fits=fits, bytes_scale=scale, **slow)

    def forward_s(self, layer: Layer, per_rank_batch_size: int) -> float:
        """Return the seconds of one layer's forward pass over a rank's batch."""
        return self._scaled(layer.forward_ms, layer.fixed_forward_ms, per_rank_batch_size)

    def backward_s(self, layer: Layer, per_rank_batch_size: int) -> float:
        """Return the seconds of one layer's backward pass over a rank's batch."""
        return self._scaled(layer.backward_ms, layer.fixed_backward_ms, per_rank_batch_size)

    def compute_s(self, per_rank_batch_size: int) -> float:
        """Return the seconds of forward and backward over a rank's batch."""
        each = (
            self.forward_s(layer, per_rank_batch_size) + self.backward_s(layer, per_rank_batch_size)
            for layer in self.layers
        )
        return sum(each)

    def rest_s(self, per_rank_batch_size: int) -> float | None:
        """Return the seconds of a step besides its layers; None if they are not known."""
        if self.rest_ms is None:
            return None
        return self._scaled(self.rest_ms, self.fixed_rest_ms, per_rank_batch_size)

    def values(self, layer: Layer) -> int:
        """Return the scaled number of float32 values of one layer's gradient."""
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
    """Return the profile that a run with these settings replays; None for a real model.

    Ranks that wait share no cores, however the profile was measured.

    Raises: ValueError: a value of the profile is out of range.
    """
    model = settings["model"]
    if model.get("_target_") != "lab.model.replay.Replay":  # a user's may have a profile too
        return None
    scaled = of_replay(settings["profile"], model["bytes_scale"], model["time_scale"])
    return replace(scaled, num_threads=None)


def of_replay(node: Mapping[str, Any], bytes_scale: float, time_scale: float) -> Profile:
    """Parse a profile, and scale it as model=replay does.

    Raises:
        ValueError: a scale is out of range, or leaves no values; or as `Profile.parse`.
    """
    checks.number("model.bytes_scale", bytes_scale, above=0, at_most=MOST_SCALE)
    checks.number("model.time_scale", time_scale, above=0, at_most=MOST_SCALE)
    scaled = Profile.parse(node).scaled(bytes_scale, time_scale)
    if not scaled.gradient_bytes:
        raise ValueError(
            f"model.bytes_scale={bytes_scale}: leaves no values in any layer; use a larger scale"
        )
    return scaled


def _rounded(key: str, value: Any) -> Any:
    """Return what is written of a value: of a time 0.1 µs, of a fitted one six digits."""
    if value is None:
        return None
    if key in ENDS:
        return float(f"{value:.6g}")
    return round(float(value), 4) if key.endswith("_ms") else value


TIMES = ("forward_ms", "backward_ms")
FIXED_TIMES = tuple(f"fixed_{key}" for key in TIMES)


def _fit_of(where: str, node: Any) -> BatchFit:
    """Parse one line of a profile's `fits`; messages of errors begin with `where`."""
    keys = [field.name for field in fields(BatchFit)]
    if not isinstance(node, Mapping) or set(node) != set(keys):
        raise ValueError(f"{where}: must have the keys {', '.join(keys)}")
    for key in ("fixed_ms", "per_sample_ms"):
        _check_interval(f"{where}.{key}", node[key])
    fixed_ms, per_sample_ms = dict(node["fixed_ms"]), dict(node["per_sample_ms"])
    return BatchFit(node["layer"], node["way"], fixed_ms, per_sample_ms)


def _check_interval(where: str, times: Any) -> None:
    if not isinstance(times, Mapping) or set(times) != set(ENDS):
        raise ValueError(f"{where}: must have the keys {', '.join(ENDS)}")
    for key in ENDS:
        value = times[key]
        if value is not None and (not checks.is_number(value) or value < 0):
            raise ValueError(f"{where}.{key}={value}: must be null or a number of at least 0")


def _check_share(where: str, ends: Any) -> None:
    numbers = isinstance(ends, Sequence) and len(ends) == 2 and all(map(checks.is_number, ends))
    if not numbers or not 0 <= ends[0] <= ends[1] < 1:
        raise ValueError(f"{where}={ends}: must be [lowest, highest], from 0 to below 1")


def _check_profile(where: str, profile: Profile, layers: tuple[Layer, ...]) -> None:
    if not layers:
        raise ValueError(f"{where}: layers=[]: must contain at least one layer")
    for key in ("name", "source"):
        if not isinstance(text := getattr(profile, key), str):
            raise ValueError(f"{where}: {key}={text}: must be text")
    _check_fixed(
        f"{where}: fixed_rest_ms", profile.fixed_rest_ms, "rest_ms", profile.rest_ms or 0.0
    )
    for index, layer in enumerate(layers):
        place = f"{where}: layers[{index}]"
        if not isinstance(layer.name, str) or not re.fullmatch(r"\w+", layer.name):
            raise ValueError(f"{place}.name={layer.name}: use only letters, digits and _")
        if layer.name in {other.name for other in layers[:index]}:
            raise ValueError(f"{place}.name={layer.name}: appears twice")
        for key, fixed_key in zip(TIMES, FIXED_TIMES, strict=True):
            whole, fixed = getattr(layer, key), getattr(layer, fixed_key)
            _check_fixed(f"{place}.{fixed_key}", fixed, key, whole)


def _check_fixed(where: str, fixed: Any, key: str, whole: float) -> None:
    """Refuse a fixed part that is not within its whole, the value of `key`."""
    if not checks.is_number(fixed) or not 0 <= fixed <= whole:
        raise ValueError(f"{where}={fixed}: must be from 0 to {key}={whole}")


def shapes(values: int) -> dict[str, tuple[int, ...]]:
    """Return shapes by name for a layer of `values` values; a profile holds no shapes.

    The weight is [rows, columns], as in an FC layer, whose rows 1-bit SGD quantises: of 1024 to
    2048 columns the number that leaves the smallest remainder, which becomes a bias. A layer of
    fewer than 1024 values is only a bias.
    """
    rows, rest = divmod(values, columns := _columns(values))
    weight = {"weight": (rows, columns)} if rows else {}
    return weight | ({"bias": (rest,)} if rest else {})


@cache  # a fit asks the same of the same few layers thousands of times
def _columns(values: int) -> int:
    return min(COLUMNS, key=lambda columns: values % columns)
