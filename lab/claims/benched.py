"""Quantities of claims on one device that lab.bench measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lab.claims.device import DevicePaper, Quantity, exact, matches, ratio, total
from lab.claims.metrics import Missing
from lab.measure.statistics import Interval
from lab.settings import checks

BEST = "best of each"
PASSES = ("forward", "backward")
PRODUCTS = "Conv2d|Linear"


def time_share(device: DevicePaper, result: str, layers: str) -> Interval:
    """Divide the time of the layers that match, forward and backward, by that of a step."""
    row = _row(device.result(result))
    return ratio(total(_times(_layers(row, layers))), exact(row["step_s"]["median"]))


def bias_and_share(device: DevicePaper, result: str, layers: str) -> Interval:
    """Divide the time of biases, and of the layers that match, by that of all but products.

    Products are convolutions and linear layers, without their biases, which count as operations of
    their own.
    """
    row = _row(device.result(result))
    others = [each for each in row["layers"] if not matches(PRODUCTS, each["kind"])]
    biased = [each.get("bias_s") for each in row["layers"] if matches(PRODUCTS, each["kind"])]
    if any(each is None for each in biased):
        raise Missing
    biases = [Interval.read(each[way]) for each in biased for way in PASSES]
    some, every = _times(_layers(row, layers)), _times(others)
    return ratio(total([*biases, *some]), total([*biases, *every]))


def backward_ratio(device: DevicePaper, result: str, layers: str = ".*") -> Interval:
    """Divide backward of the layers that match by their forward."""
    found = _layers(_row(device.result(result)), layers)
    forward, backward = (total(_times(found, way)) for way in PASSES)
    return ratio(backward, forward)


def input_grad_share(device: DevicePaper, result: str) -> Interval:
    """Divide what the gradient of the model's input costs by the step that has it."""
    row = _row(device.result(result))
    if row["input_grad_s"] is None:
        raise Missing
    return ratio(Interval.read(row["input_grad_s"]), exact(row["step_s"]["median"]))


def algorithm_time(
    device: DevicePaper, result: str, algorithm: str, layers: str = ".*", direction: str = ".*"
) -> Interval:
    """Add up the seconds of a model's convolutions by one algorithm, or the best of each pass.

    The library takes the place of an algorithm that refuses. Backward data of the first layer is
    left out, because no step needs it. An interval is that of the ratio to the library.
    """
    rows: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in device.result(result)["rows"]:
        unneeded = row["is_first"] and row["pass"] == "backward data"
        if matches(layers, row["layer"]) and matches(direction, row["pass"]) and not unneeded:
            rows.setdefault((row["layer"], row["pass"]), {})[row["algorithm"]] = row
    if not rows:
        raise ValueError(f"layers={layers}: {result} has no such convolution")
    seconds = []
    for found in rows.values():
        library = found["library"]
        ran = [row for row in found.values() if row["time_s"]]
        if algorithm == BEST:
            row = min(ran, key=lambda one: one["time_s"]["median"])
        else:
            row = next((one for one in ran if one["algorithm"] == algorithm), library)
        factor = row["count"] * library["time_s"]["median"]
        seconds.append(Interval.read(row["ratio"]).scaled(factor))
    return total(seconds)


def counted_events(
    device: DevicePaper,
    result: str,
    event: str,
    layers: str,
    direction: str = ".*",
    batch: str = ".*",
) -> Interval:
    """Add up one of callgrind's counts, such as instructions, over layers and passes."""
    rows = _counted(device, result, layers, direction, batch)
    return exact(sum(row[event] for row in rows))


def access_share(device: DevicePaper, result: str, layers: str, direction: str = ".*") -> Interval:
    """Divide loads and stores by instructions."""
    rows = _counted(device, result, layers, direction)
    accesses = sum(row["loads"] + row["stores"] for row in rows)
    return exact(accesses / sum(row["instructions"] for row in rows))


def hit_rate(
    device: DevicePaper,
    result: str,
    level: int,
    layers: str,
    access: str = "load",
    direction: str = ".*",
) -> Interval:
    """Divide a cache level's hits by the accesses that reach it."""
    rows = _counted(device, result, layers, direction)
    accesses, first, second = (
        sum(row[key] for row in rows)
        for key in (f"{access}s", f"l1_{access}_misses", f"l2_{access}_misses")
    )
    reached, missed = (accesses, first) if level == 1 else (first, second)
    return exact(1 - missed / reached)


def slowdown(device: DevicePaper, result: str) -> Interval:
    """Return how many times as long a pass takes while its events are counted."""
    return exact(device.result(result)["slowdown"])


def bench_samples_per_s(
    device: DevicePaper, result: str, name: str, way: str = "training"
) -> Interval:
    """Return the rate of one row of lab.bench throughput, in training or inference."""
    return Interval.read(_named(device.result(result), name)[way])


def products_share(device: DevicePaper, result: str, name: str) -> Interval:
    """Return the share of a step's time that goes into matrix products and convolutions."""
    share = _named(device.result(result), name)["products_share"]
    if share is None:
        raise Missing
    return exact(share)


def fusable_share(device: DevicePaper, result: str) -> Interval:
    """Divide the bytes that fusing layers would save by all that they move."""
    rows = device.result(result)["rows"]
    return exact(sum(row["loose_bytes"] for row in rows) / sum(row["num_bytes"] for row in rows))


def layout_ratio(device: DevicePaper, result: str, layout: str) -> Interval:
    """Divide the time of a step in a layout by that of NCHW."""
    steps = {step["layout"]: step["ratio"] for step in device.result(result)["steps"]}
    return Interval.read(steps[checks.one_of("layout", layout, steps)])


def _row(result: dict[str, Any]) -> dict[str, Any]:
    (row,) = result["rows"]
    return row


def _named(result: dict[str, Any], name: str) -> dict[str, Any]:
    rows = {row["name"]: row for row in result["rows"]}
    return rows[checks.one_of("name", name, rows)]


def _layers(row: dict[str, Any], layers: str) -> list[dict[str, Any]]:
    found = [each for each in row["layers"] if matches(layers, each["name"], each["kind"])]
    if not found:
        raise ValueError(f"layers={layers}: there is no such layer")
    return found


def _times(layers: Sequence[Mapping[str, Any]], *ways: str) -> list[Interval]:
    """Return the times of some layers, forward and backward unless `ways` says otherwise."""
    return [Interval.read(each[f"{way}_s"]) for each in layers for way in ways or PASSES]


def _counted(
    device: DevicePaper, result: str, layers: str, direction: str, batch: str = ".*"
) -> list[dict[str, Any]]:
    found = [
        row
        for row in device.result(result)["rows"]
        if matches(layers, row["layer"], row["kind"])
        and matches(direction, row["pass"])
        and matches(batch, str(row["batch_size"]))
    ]
    if not found:
        raise ValueError(f"layers={layers}: {result} has no such count")
    return found


QUANTITIES: tuple[Quantity, ...] = (
    *(time_share, bias_and_share, backward_ratio, input_grad_share, algorithm_time),
    *(counted_events, access_share, hit_rate, slowdown, bench_samples_per_s, products_share),
    *(fusable_share, layout_ratio),
)
BENCHED = {quantity.__name__: quantity for quantity in QUANTITIES}
