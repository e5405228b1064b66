"""Files of conf/hardware: reading, checking, and the ranges of what they assume."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, replace
from typing import Any

from lab.measure.peaks import gpu_peak
from lab.settings import checks
from lab.simulate.hardware import THIS_CPU, Device, Hardware, Link, Range
from lab.simulate.network import PROTOCOLS

HERE = "here"  # num_cores: those that this process may use
LIBRARIES = ("gloo", "nccl")
WAYS = ("intra", "inter")
OPTIONAL = ("reduce_bytes_per_s", "update_bytes_per_s", "input_samples_per_s", "memory_bytes")
LEAST = {
    "codec_bytes_per_s": 1,
    "codec_s": 0,
    "reduce_bytes_per_s": 1,
    "update_bytes_per_s": 1,
    "input_samples_per_s": 1,
    "memory_bytes": 1,
    "contention": 0,
    "overhead_s": 0,
    "overhead_s_per_rank": 0,
    "burst_s": 0,
    "jitter": 0,
    "num_slow": 0,
    "slow_factor": 1,
}
LEAST_OF_LINK = {"latency_s": 0, "bandwidth_bytes_per_s": 1, "duplex": 0.1}
RENAMED = {"alpha_s": "latency_s", "beta_bytes_per_s": "bandwidth_bytes_per_s"}  # of a link
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
MAPPINGS = {"peak_flops_per_s": 1.0, "op_efficiency": 1e-3, "op_rates": 1.0}  # least values
CONVOLUTIONS = ("convolution", "convolution_backward")
LEAST_OF_DEVICE = {
    "bandwidth_bytes_per_s": 0.0,
    "compute_efficiency": 1e-3,
    "memory_efficiency": 1e-3,
    "op_s": 0.0,
    "cache_bytes": 0.0,
    "cache_bytes_per_s": 0.0,
}


def parse(node: Mapping[str, Any]) -> Hardware:
    """Parse the content of a file of conf/hardware.

    Raises:
        ValueError: a value that is missing, unknown or out of range.
    """
    name = f"hardware={node.get('name')}"
    _check_keys(name, node, Hardware)
    try:
        links = {way: node[way] and _link(f"{name}: {way}", node[way]) for way in WAYS}
        lists = {key: tuple(node[key]) for key in ("node_rates", "protocols") if key in node}
        plain = {key: value for key, value in node.items() if key != "assumed"}
        if plain.get("num_cores") == HERE:
            plain["num_cores"] = len(os.sched_getaffinity(0))
        plain["device"] = parse_device(name, node["device"]) if node.get("device") else None
        hardware = Hardware(**{**plain, **links, **lists})
        assumed = tuple(_range(name, *given) for given in node.get("assumed", {}).items())
        _check_hardware(name, hardware)
        for each in assumed:
            _check_range(name, hardware, each)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{name}: {error}") from None
    return replace(hardware, assumed=assumed)


def draws(hardware: Hardware, number: int) -> Iterator[Hardware]:
    """Draw each assumed value anew, `number` times: logarithms evenly over their range.

    The draws are the same each time, so that two strategies meet the same machines. Those of the
    device have a generator of their own: only estimates need it, and no other prediction moves.
    """
    chances = {False: random.Random(0), True: random.Random(2)}
    for _ in range(number):
        drawn = hardware
        for each in hardware.assumed:
            chance = chances[each.key.startswith("device.")]
            drawn = with_value(drawn, each.key, _between(each, chance.random()))
        yield drawn


def places(number: int) -> list[float]:
    """Draw where in its range a profile's assumed value lies, as `draws` does."""
    chance = random.Random(1)
    return [chance.random() for _ in range(number)]


def with_value(hardware: Hardware, key: str, value: float) -> Hardware:
    """Return the hardware with another value of a dotted key, as in `intra.latency_s`."""
    way, _, name = key.rpartition(".")
    if not way:
        return replace(hardware, **{name: value})
    return replace(hardware, **{way: replace(getattr(hardware, way), **{name: value})})


def _between(ends: Range, share: float) -> float:
    if ends.low <= 0:
        return ends.low + share * (ends.high - ends.low)
    return ends.low * (ends.high / ends.low) ** share


def _check_keys(where: str, node: Mapping[str, Any], kind: type[Hardware] | type[Link]) -> None:
    known = {field.name: field.default for field in fields(kind)}
    for key, value in node.items():
        if key not in known:
            raise ValueError(f"{where}: {key}={value}: no such key; allowed are {', '.join(known)}")
    for key, default in known.items():
        if default is MISSING and key not in node:
            raise ValueError(f"{where}: {key}: is missing")


def _check_hardware(name: str, hardware: Hardware) -> None:
    if hardware.library not in LIBRARIES:
        allowed = ", ".join(LIBRARIES)
        raise ValueError(f"{name}: library={hardware.library}: allowed are {allowed}")
    for key, least in LEAST.items():
        if getattr(hardware, key) is not None or key not in OPTIONAL:
            checks.number(f"{name}: {key}", getattr(hardware, key), least)
    checks.whole(f"{name}: ranks_per_node", hardware.ranks_per_node, 1)
    if hardware.num_cores is not None:
        checks.whole(f"{name}: num_cores", hardware.num_cores, 1)
    if hardware.ranks_per_node > 1 and hardware.intra is None:
        raise ValueError(f"{name}: intra=null: must join the {hardware.ranks_per_node} ranks")
    for rate in hardware.node_rates:
        checks.number(f"{name}: node_rates", rate, 1)
    if not hardware.protocols or set(hardware.protocols) - set(PROTOCOLS):
        allowed = ", ".join(PROTOCOLS)
        raise ValueError(f"{name}: protocols={hardware.protocols}: must be some of {allowed}")


def _check_range(name: str, hardware: Hardware, given: Range) -> None:
    """Refuse a range of what is no number of the hardware, or that leaves out its value."""
    way, _, key = given.key.rpartition(".")
    value = getattr(getattr(hardware, way) if way else hardware, key)
    checks.number(f"{name}: assumed.{given.key}", given.low, 0)
    checks.number(f"{name}: assumed.{given.key}", given.high, given.low)
    if value is None or not given.low <= value <= given.high or math.isnan(value):
        raise ValueError(
            f"{name}: assumed.{given.key}=[{given.low}, {given.high}]: leaves out its value {value}"
        )


def _range(name: str, key: str, ends: Any) -> Range:
    if not isinstance(ends, list) or len(ends) != 2:
        raise ValueError(f"{name}: assumed.{key}={ends}: must be [lowest, highest]")
    return Range(key, *ends)


def _link(where: str, figures: Mapping[str, Any]) -> Link:
    for key in figures.keys() & RENAMED.keys():
        raise ValueError(f"{where}.{key}={figures[key]}: is {RENAMED[key]} now")
    _check_keys(where, figures, Link)
    links = figures.get("num_links", 1)
    if isinstance(links, Mapping):
        links = tuple(sorted((int(ranks), count) for ranks, count in links.items()))
        if not links or links[0][0] != 2:
            raise ValueError(f"{where}.num_links={dict(links)}: must begin with 2 ranks")
    link = Link(**{**figures, "num_links": links})
    for key, least in LEAST_OF_LINK.items():
        checks.number(f"{where}.{key}", getattr(link, key), least)
    if link.duplex > 1:
        raise ValueError(f"{where}.duplex={link.duplex}: must be at most 1")
    for count in (links,) if isinstance(links, int) else (count for _, count in links):
        checks.whole(f"{where}.num_links", count, 1)
    return link


def parse_device(name: str, node: Mapping[str, Any]) -> Device:
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
    for key, least in LEAST_OF_DEVICE.items():
        checks.number(f"{name}: device.{key}", getattr(device, key), least)
    return _with_peaks(name, device)


def of_this_machine(device: Device) -> Device:
    """Return the device with its peak; that of THIS_CPU is measured here, which imports torch.

    Its peak is the rate of large matrix products, and the rate of convolutions is in its
    `op_efficiency`, unless the device has figures of its own.
    """
    if device.name != THIS_CPU or device.peak_flops_per_s:
        return device
    from lab.measure.peaks import measured_rates

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
    """Take what the block leaves out from the table."""
    if peak := gpu_peak(device.name):
        return replace(
            device,
            source=device.source or peak.source,
            peak_flops_per_s=device.peak_flops_per_s or tuple(peak.flops_per_s.items()),
            bandwidth_bytes_per_s=device.bandwidth_bytes_per_s or peak.bandwidth_bytes_per_s or 0.0,
        )
    if not device.bandwidth_bytes_per_s or not (device.peak_flops_per_s or device.name == THIS_CPU):
        raise ValueError(
            f"{name}: device.name={device.name}: lab/measure/peaks.py does not know it; give "
            "device.peak_flops_per_s.fp32 and device.bandwidth_bytes_per_s"
        )
    return device


def _pairs(key: str, node: object, least: float) -> tuple[tuple[str, float], ...]:
    if not isinstance(node, Mapping):
        raise ValueError(f"{key}={node}: must be values by name")
    for name, value in node.items():
        checks.number(f"{key}.{name}", value, least)
    return tuple((str(name), float(value)) for name, value in node.items())
