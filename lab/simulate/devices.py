"""The `device:` of a file of conf/hardware: reading and checking it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from lab.measure.peaks import Peak, gpu_peak
from lab.model.numbers import is_number
from lab.simulate.hardware import THIS_CPU, Device

PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
MAPPINGS = {"peak_flops_per_s": 1.0, "op_efficiency": 1e-3, "op_rates": 1.0}  # least values
CONVOLUTIONS = ("convolution", "convolution_backward")
LEAST = {
    "bandwidth_bytes_per_s": 0.0,
    "compute_efficiency": 1e-3,
    "memory_efficiency": 1e-3,
    "op_s": 0.0,
    "cache_bytes": 0.0,
    "cache_bytes_per_s": 0.0,
}


def parse(name: str, node: Mapping[str, Any]) -> Device:
    """Parse a `device:` block. Peaks that it leaves out are those of lab/measure/peaks.py.

    Args:
        name: of the hardware, for messages.

    Raises:
        ValueError: a value that is missing, unknown or out of range.
    """
    allowed = [field.name for field in fields(Device)]
    if not isinstance(node, Mapping) or "name" not in node:
        raise ValueError(f"{name}: device={node}: must have a name; allowed are {allowed}")
    for key in node:
        if key not in allowed:
            raise ValueError(f"{name}: device.{key}: no such key; allowed are {', '.join(allowed)}")
    pairs = {
        key: _pairs(f"{name}: device.{key}", node[key], least)
        for key, least in MAPPINGS.items()
        if key in node
    }
    device = Device(**{**node, **pairs})
    for precision, _ in device.peak_flops_per_s:
        if precision not in PRECISIONS:
            raise ValueError(
                f"{name}: device.peak_flops_per_s.{precision}: allowed are {', '.join(PRECISIONS)}"
            )
    for key, least in LEAST.items():
        _check(f"{name}: device.{key}", getattr(device, key), least)
    return _with_peaks(name, device)


def of_this_machine(device: Device) -> Device:
    """Return the device with its peak; that of THIS_CPU is measured here, which imports torch.

    Its peak is the rate of large matrix products, and the rate of convolutions is in its
    `op_efficiency`, unless the device has figures of its own.
    """
    if device.name != THIS_CPU or device.peak_flops_per_s:
        return device
    from lab.measure.rates import measured_rates

    num_threads = device.num_threads or 1
    rates = measured_rates(num_threads)
    to_product = rates.convolution / rates.product
    found = f"measured: large products on {num_threads} thread{'s' if num_threads > 1 else ''}"
    return replace(
        device,
        source=device.source or f"{found}; convolutions reach {to_product:.2f} times as much",
        peak_flops_per_s=(("fp32", rates.product),),
        op_efficiency=(*((name, to_product) for name in CONVOLUTIONS), *device.op_efficiency),
    )


def _with_peaks(name: str, device: Device) -> Device:
    peak = gpu_peak(device.name)
    if peak:
        return _filled(device, peak)
    if not device.bandwidth_bytes_per_s or not (device.peak_flops_per_s or device.name == THIS_CPU):
        raise ValueError(
            f"{name}: device.name={device.name}: lab/measure/peaks.py does not know it; give "
            "device.peak_flops_per_s.fp32 and device.bandwidth_bytes_per_s"
        )
    return device


def _filled(device: Device, peak: Peak) -> Device:
    """Take what the block leaves out from the table."""
    return replace(
        device,
        source=device.source or peak.source,
        peak_flops_per_s=device.peak_flops_per_s or tuple(peak.flops_per_s.items()),
        bandwidth_bytes_per_s=device.bandwidth_bytes_per_s or peak.bandwidth_bytes_per_s or 0.0,
    )


def _pairs(key: str, node: object, least: float) -> tuple[tuple[str, float], ...]:
    if not isinstance(node, Mapping):
        raise ValueError(f"{key}={node}: must be values by name")
    for name, value in node.items():
        _check(f"{key}.{name}", value, least)
    return tuple((str(name), float(value)) for name, value in node.items())


def _check(key: str, value: object, least: float) -> None:
    if not is_number(value) or value < least:
        raise ValueError(f"{key}={value}: must be a number of at least {least:g}")
