"""Estimates: the times of a model that nobody measured, by its counted work and a device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lab.measure.peaks import arithmetic_of
from lab.model.profile import VALUE_BYTES, Layer, Profile
from lab.model.work import Operation, Work
from lab.settings.errors import ConfigError
from lab.settings.names import class_name
from lab.simulate.hardware import Device, Hardware, of_this_machine
from lab.sync.pattern import MOMENTUM

ESTIMATE = "estimate"  # begins the source of such a profile
INPUT_PASSES = 2  # a batch is gathered from the data set
HALF = ("bf16", "fp16")  # activations and products take two bytes a value
COUNTED = ("model", "transform", "task", "data", "seed")  # settings that decide a model's work
RATIO = 2  # at least so many times apart are the two batches that give the fixed parts


@dataclass(frozen=True)
class Estimate:
    """Counted work, whose times follow from the hardware's device.

    Attributes:
        precision: a key of the device's peaks.
        batches: samples per rank, the smallest and the largest of interest: profiles hold at both,
            and on a line between them.
        name: of its profiles.
    """

    work: Work
    precision: str
    batches: tuple[int, int]
    name: str

    def profile_of(self, device: Device) -> Profile:
        """Estimate the layers' times on a device.

        An operation takes the longer of its products at `compute_efficiency` of the peak and its
        bytes at `memory_efficiency` of the bandwidth, and `op_s`. The rest of the step is the
        gathering of the batch; the update depends on the optimizer.

        Raises:
            ValueError: the peak at this precision is not known.
        """
        work, precision, batches = self.work, self.precision, self.batches
        peaks = dict(device.peak_flops_per_s)
        if precision not in peaks:
            raise ValueError(
                f"precision={precision}: device.peak_flops_per_s of {device.name} has only "
                f"{', '.join(peaks)}; give hardware.device.peak_flops_per_s.{precision}"
            )
        fewer, more = min(batches), max(*batches, RATIO * min(batches))

        def times(operations: Sequence[Operation]) -> tuple[float, float]:
            """Return the ms at the larger batch, and the part that does not depend on it."""
            at_more = _milliseconds(device, precision, operations, more)
            at_fewer = _milliseconds(device, precision, operations, fewer)
            return at_more, fixed_part(at_more, at_fewer, more / fewer)

        layers = list[Layer]()
        for each in work.layers:
            whole, fixed = zip(times(each.forward), times(each.backward), strict=True)
            layers.append(Layer(each.name, each.parameters, *whole, *fixed))
        rest_ms = _rest_ms(device, work, more)
        return Profile(
            self.name,
            f"{ESTIMATE}: {work.flops_per_sample:.4g} FLOP per sample, counted, on {device.name} "
            f"({peaks[precision] / 1e12:.4g} TFLOP/s {precision}, {device.source})",
            more,
            tuple(layers),
            rest_ms=rest_ms,
            fixed_rest_ms=fixed_part(rest_ms, _rest_ms(device, work, fewer), more / fewer),
            update_bytes_per_s=device.rate_of(MOMENTUM.passes * VALUE_BYTES * work.num_parameters),
            num_threads=device.num_threads,
            num_kernels=sum(len(each.forward) + len(each.backward) for each in work.layers),
        )


def _rest_ms(device: Device, work: Work, batch: int) -> float:
    """Return the time of a step beside its layers and the update's passes over memory.

    That is the gathering of the batch, in the data's type at any precision, and both launches.
    """
    num_bytes = INPUT_PASSES * work.input_bytes * batch
    return 1000 * (2 * device.op_s + num_bytes / device.rate_of(num_bytes))


def _milliseconds(
    device: Device, precision: str, operations: Iterable[Operation], batch: int
) -> float:
    """Return the time of operations one after the other, by the roofline of a device."""
    efficiencies, rates = dict(device.op_efficiency), dict(device.op_rates)
    peak_flops_per_s = dict(device.peak_flops_per_s)[precision] * device.compute_efficiency
    peak_flops_per_s *= efficiencies.get(precision, 1.0)
    seconds = []
    for operation in operations:
        num_bytes = operation.num_bytes.at(batch) / (2 if precision in HALF else 1)
        in_general = efficiencies.get(operation.name, 1.0)
        factor = efficiencies.get(f"{precision}.{operation.name}", in_general)
        flops_per_s = peak_flops_per_s * factor
        rate = rates.get(operation.name) or device.rate_of(num_bytes)
        products_s = operation.flops.at(batch) / flops_per_s
        seconds.append(device.op_s + max(products_s, num_bytes / rate))
    return 1000 * sum(seconds)


Source = Profile | Estimate  # a measured profile holds on any hardware


def profile_on(source: Source, hardware: Hardware) -> Profile:
    """Return the profile that holds on some hardware, or that its device would have.

    Raises:
        ValueError: for an estimate, the hardware names no device, or not its peak.
    """
    if isinstance(source, Profile):
        return source
    if hardware.device is None:
        raise ValueError(
            f"hardware={hardware.name} has no device for estimates of a model; give "
            "hardware.device.name (see lab/measure/peaks.py), or profile= of the measured model"
        )
    return source.profile_of(of_this_machine(hardware.device))


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
        return profile
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
    from lab.problem import blueprint, require_float32

    config: Any = OmegaConf.create(parts)
    plan = blueprint(config)
    require_float32(plan.model)
    shape, dtype = plan.data.input_shape, plan.data.input_dtype
    try:
        return count(plan.model, shape, dtype, plan.target, plan.task.loss)
    except Uncountable as error:
        raise ConfigError(
            f"model={config.model['_target_']}: its operations cannot be counted ({error}); "
            "measure the model with lab.profile_layers out=FILE.yaml and give profile=FILE.yaml"
        ) from None


def fixed_part(at_whole: float, at_fewer: float, ratio: float) -> float:
    """Return the value at batch size 0 of a line through two batches, the second smaller.

    It is clamped to between 0 and the whole.
    """
    return min(max((ratio * at_fewer - at_whole) / (ratio - 1), 0.0), at_whole)
