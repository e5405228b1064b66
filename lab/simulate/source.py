"""Sources of a model's times: a profile, or an estimate that depends on the hardware."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

from omegaconf import DictConfig, OmegaConf

from lab.measure.peaks import arithmetic_of
from lab.model.profile import VALUE_BYTES, Layer, Profile
from lab.model.work import LayerWork, Line, Operation, Work
from lab.settings.errors import ConfigError
from lab.settings.names import class_name
from lab.simulate.hardware import Device, Hardware
from lab.simulate.presets import of_this_machine
from lab.simulate.step import UPDATE_PASSES

INPUT_PASSES = 2  # a batch is gathered from the data set
ESTIMATE = "estimate"  # begins the source of such a profile
HALF = ("bf16", "fp16")  # activations and products take two bytes a value
COUNTED = ("model", "transform", "task", "data", "seed")  # settings that decide a model's work
RATIO = 2  # at least so many times apart are the two batches that give the fixed parts


@dataclass(frozen=True)
class Measured:
    """A profile, which holds on any hardware that it is predicted on."""

    basis: ClassVar[str] = "profile"
    profile: Profile

    def on(self, hardware: Hardware) -> Profile:
        """Return the profile."""
        return self.profile


@dataclass(frozen=True)
class Estimate:
    """Counted work, whose times follow from the hardware's device.

    Attributes:
        precision: a key of the device's peaks.
        batches: samples per rank, the smallest and the largest of interest: profiles hold at both,
            and on a line between them.
        name: of its profiles.
    """

    basis: ClassVar[str] = ESTIMATE
    work: Work
    precision: str
    batches: tuple[int, int]
    name: str

    def on(self, hardware: Hardware) -> Profile:
        """Return the profile that the device of this hardware would have.

        Raises:
            ValueError: the hardware names no device, or not its peak.
        """
        if hardware.device is None:
            raise ValueError(
                f"hardware={hardware.name}: has no device to estimate a model on; give "
                "hardware.device.name (lab/measure/peaks.py), or the model's measured profile="
            )
        return self.profile_of(of_this_machine(hardware.device))

    def profile_of(self, device: Device) -> Profile:
        """Estimate the layers' times on a device.

        An operation takes the longer of its products at `compute_efficiency` of the peak and its
        bytes at `memory_efficiency` of the bandwidth, and `op_s`. The rest of the step is the
        update, and the gathering of the batch.

        Raises:
            ValueError: the peak at this precision is not known.
        """
        work, precision, batches = self.work, self.precision, self.batches
        peaks = dict(device.peak_flops_per_s)
        if precision not in peaks:
            raise ValueError(
                f"precision={precision}: device.peak_flops_per_s of {device.name} has "
                f"{', '.join(peaks)}; give hardware.device.peak_flops_per_s.{precision}"
            )
        fewer, more = min(batches), max(*batches, RATIO * min(batches))
        timer = _Timer(device, peaks[precision], precision in HALF)
        layers, layers_of_fewer = (
            [timer.layer(layer, batch) for layer in work.layers] for batch in (more, fewer)
        )
        rest_ms, rest_of_fewer = (timer.milliseconds(_rest(work), batch) for batch in (more, fewer))
        return Profile(
            self.name,
            f"{ESTIMATE}: {work.flops_per_sample:.4g} FLOP per sample, counted, on {device.name} "
            f"({peaks[precision] / 1e12:.4g} TFLOP/s {precision}, {device.source})",
            more,
            tuple(with_fixed_parts(layers, layers_of_fewer, more / fewer)),
            rest_ms=rest_ms,
            fixed_rest_ms=fixed_part(rest_ms, rest_of_fewer, more / fewer),
            num_threads=device.num_threads,
        )


Source = Measured | Estimate


def source_of(config: DictConfig, profile: Profile | None, batches: tuple[int, int]) -> Source:
    """Return the source of the times of a run: its profile, or else an estimate of its model.

    Args:
        config: settings of the run; its model is counted at most once in a process.
        profile: measured; None: the model is estimated.
        batches: samples per rank, the smallest and the largest of interest.

    Raises:
        ConfigError: the model cannot be built or counted.
    """
    if profile:
        return Measured(profile)
    work = work_of(config)
    model = class_name(config.model["_target_"])
    name = f"{model}, {work.flops_per_sample / 1e9:.4g} GFLOP per sample (estimate)"
    return Estimate(work, arithmetic_of(config.precision, config.tf32), batches, name)


def work_of(config: DictConfig) -> Work:
    """Count the work of a run's model, at most once in a process.

    Raises:
        ConfigError: a part cannot be built, the model does not fit the data, or its operations
            cannot be counted.
    """
    parts: Any = OmegaConf.to_container(config, resolve=True)
    return _work(OmegaConf.to_yaml({part: parts[part] for part in COUNTED}))


@lru_cache(maxsize=64)
def _work(parts: str) -> Work:
    """Count a model, which is built without its values."""
    from lab.measure.operations import Uncountable, count  # with torch, which few predictions need
    from lab.problem.build import blueprint, require_float32

    config: Any = OmegaConf.create(parts)
    plan = blueprint(config)
    require_float32(plan.model)
    shape, dtype = plan.data.input_shape, plan.data.input_dtype
    try:
        return count(plan.model, shape, dtype, plan.target, plan.task.loss)
    except Uncountable as error:
        raise ConfigError(
            f"model={config.model['_target_']}: cannot be counted for an estimate ({error}); "
            "measure it with lab.profile_layers out=FILE.yaml and give profile=FILE.yaml"
        ) from None


def with_fixed_parts(whole: Sequence[Layer], fewer: Sequence[Layer], ratio: float) -> list[Layer]:
    """Add to each layer of `whole` the part of its time that does not depend on the batch size.

    Args:
        whole: layers at the reference batch size.
        fewer: the same layers at a batch size `ratio` times smaller.
    """
    return [
        replace(
            layer,
            fixed_forward_ms=fixed_part(layer.forward_ms, less.forward_ms, ratio),
            fixed_backward_ms=fixed_part(layer.backward_ms, less.backward_ms, ratio),
        )
        for layer, less in zip(whole, fewer, strict=True)
    ]


def fixed_part(at_whole: float, at_fewer: float, ratio: float) -> float:
    """Return the value at batch size 0 of a line through two batches, the second smaller.

    It is clamped to between 0 and the whole.
    """
    return min(max((ratio * at_fewer - at_whole) / (ratio - 1), 0.0), at_whole)


def _rest(work: Work) -> tuple[Operation, ...]:
    update = Line(UPDATE_PASSES * VALUE_BYTES * work.num_parameters, 0.0)
    gathered = Line(0.0, INPUT_PASSES * work.input_bytes)
    nothing = Line(0.0, 0.0)
    return Operation("update", nothing, update), Operation("input", nothing, gathered)


class _Timer:
    """The roofline of a device at one precision."""

    def __init__(self, device: Device, peak_flops_per_s: float, half: bool) -> None:
        self._device, self._half = device, half
        self._flops_per_s = peak_flops_per_s * device.compute_efficiency
        self._op_efficiency, self._op_rates = dict(device.op_efficiency), dict(device.op_rates)

    def layer(self, layer: LayerWork, batch: int) -> Layer:
        """Return a layer with its times at a batch."""
        times = (self.milliseconds(way, batch) for way in (layer.forward, layer.backward))
        return Layer(layer.name, layer.parameters, *times)

    def milliseconds(self, operations: Iterable[Operation], batch: int) -> float:
        """Return the time of operations one after the other."""
        return 1000 * sum(self._seconds(operation, batch) for operation in operations)

    def _seconds(self, operation: Operation, batch: int) -> float:
        num_bytes = operation.num_bytes.at(batch) / (2 if self._half else 1)
        flops_per_s = self._flops_per_s * self._op_efficiency.get(operation.name, 1.0)
        products_s = operation.flops.at(batch) / flops_per_s
        return self._device.op_s + max(products_s, num_bytes / self._rate(operation, num_bytes))

    def _rate(self, operation: Operation, num_bytes: float) -> float:
        """Return the bytes per second at which an operation moves its data."""
        device = self._device
        if operation.name in self._op_rates:
            return self._op_rates[operation.name]
        if num_bytes < device.cache_bytes:
            return device.cache_bytes_per_s
        return device.bandwidth_bytes_per_s * device.memory_efficiency
