"""A model's layers under a roofline: how fast each could be, by its operations and bytes, and is.

(S. Williams, A. Waterman and D. Patterson, Roofline: An Insightful Visual Performance Model,
Communications of the ACM 52(4), 2009.) The roofs are this machine's, as measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import pandas as pd
import torch
from omegaconf import DictConfig

from lab.benchmarks.catalogue import size_name
from lab.benchmarks.harness import on_one_rank
from lab.benchmarks.present import Column, Drawn, Row, decimals, number, text, threaded
from lab.benchmarks.request import BenchRequest
from lab.device.profile import measured
from lab.distributed.world import World
from lab.draw.chart import BLACK, BLUE, LABEL_PX, VERMILLION, alt
from lab.draw.plots import Axis
from lab.draw.text import number_of
from lab.measure.operations import Uncountable, count
from lab.measure.peaks import arithmetic_of, copy_rate, gpu_peak, measured_rates
from lab.model.profile import Layer
from lab.model.work import Operation, Work
from lab.problem import blueprint
from lab.settings.config import ConfigError
from lab.settings.names import class_name

COPIES = (200_000, 4_000_000, 256_000_000)  # bytes: about those of two caches, and of none
STEPS, WARMUP = 24, 4
G, MB = 1e-9, 1e-6
COLOURS = {"forward": BLUE, "backward": VERMILLION}
ROOFS = ("roof of products and memory", "of copies in caches")
NAMED = 6  # layers whose names are in the figure: those that take longest
CLOSE = (0.5, 0.08)  # decades, along x and y, in which two names would overlap
SIZE = (620, 360)  # pixels


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


def rows_of(work: Work, layers: Iterable[Layer], batch: int, roofs: Roofs) -> list[dict[str, Any]]:
    """Join counted work and measured times of the same layers: a row for each, forward or backward.

    Args:
        layers: measured at `batch`, in any order.

    Returns:
        flops, num_bytes: counted; bytes as if no cache kept any. seconds: measured. loose_bytes: of
        num_bytes, moved by operations without products, such as ReLU and pooling: fused into the
        product before them, they would not go to memory. of_roof: the least seconds that products
        and memory take, whichever take longer, over the measured ones.
    """
    measured = {layer.name: layer for layer in layers}
    return [
        {"layer": counted.name, "way": way, **_under(roofs, operations, took_ms / 1000, batch)}
        for counted in work.layers
        for way, operations, took_ms in (
            ("forward", counted.forward, measured[counted.name].forward_ms),
            ("backward", counted.backward, measured[counted.name].backward_ms),
        )
    ]


def _under(
    roofs: Roofs, operations: Iterable[Operation], seconds: float, batch: int
) -> dict[str, Any]:
    counts = [(each.flops.at(batch), each.num_bytes.at(batch)) for each in operations]
    flops, num_bytes = (sum(values) for values in zip((0.0, 0.0), *counts, strict=True))
    loose = sum(moved for products, moved in counts if not products)
    products_s = flops / roofs.flops_per_s
    memory_s = num_bytes / roofs.bytes_per_s[max(roofs.bytes_per_s)]
    return {
        "flops": flops,
        "num_bytes": num_bytes,
        "seconds": seconds,
        "loose_bytes": loose if flops else 0.0,
        "flops_per_byte": flops / num_bytes if num_bytes else None,
        "bound": "products" if products_s >= memory_s else "memory",
        "of_roof": max(products_s, memory_s) / seconds if seconds else None,
    }


@on_one_rank
def measure(request: BenchRequest, world: World) -> dict[str, Any]:
    """Measure the roofs and the layers of one model at one batch."""
    config = request.config
    # As lab.profile_layers: a rate of 0 keeps the weights.
    config.measure, config.steps, config.warmup_steps = "breakdown", STEPS, WARMUP
    config.optim.lr = 0.0
    plan = blueprint(config)
    data = plan.data
    try:
        work = count(plan.model, data.input_shape, data.input_dtype, plan.target, plan.task.loss)
    except Uncountable as error:
        raise ConfigError(
            f"model={config.model['_target_']}: its operations cannot be counted: {error}"
        ) from None
    roofs = roofs_of(config, world.device)
    (at_batch,) = measured([config], world)
    return {
        "rows": rows_of(work, at_batch.layers, config.batch_size, roofs),
        "roofs": {**asdict(roofs), "bytes_per_s": list(map(list, roofs.bytes_per_s.items()))},
        "model": class_name(config.model["_target_"]),
        "batch_size": config.batch_size,
        "unit": data.unit,
    }


def roofs_of(config: DictConfig, device: torch.device) -> Roofs:
    """Return a GPU's peaks by its datasheet, or those of the CPU as measured.

    Raises:
        ConfigError: the GPU's peaks are not known.
    """
    if device.type == "cpu":
        threads = torch.get_num_threads()
        rates = measured_rates(threads)
        copies = {size: copy_rate(size, threads) for size in COPIES}
        source = f"measured, {number_of(threads, 'thread')}"
        return Roofs(max(rates.product, rates.convolution), copies, source)
    name = torch.cuda.get_device_name(device)
    found = gpu_peak(name)
    rate = found and found.flops_per_s.get(arithmetic_of(config.precision, config.tf32))
    if not (found and rate and found.bandwidth_bytes_per_s):
        raise ConfigError(f"device={name}: its peaks are not in lab/measure/peaks.py")
    return Roofs(rate, {0: found.bandwidth_bytes_per_s}, found.source)


COLUMNS: dict[str, Column] = {
    "layer": text("layer"),
    "": text("way"),
    "GFLOP": number("flops", G, 3),
    "MB": number("num_bytes", MB, 2),
    "FLOP/byte": number("flops_per_byte"),
    "ms": number("seconds", 1e3, 3),
    "GFLOP/s": lambda row: decimals(_rate(row)),
    "bound by": text("bound"),
    "of the roof %": number("of_roof", 100, 0),
    "fusable MB": number("loose_bytes", MB, 2),
}


def _rate(row: Row) -> float | None:
    """Return operations per second in billions."""
    return G * row["flops"] / row["seconds"] if row["seconds"] else None


def notes(result: dict[str, Any]) -> list[str]:
    roofs, rows = result["roofs"], result["rows"]
    copies = ", ".join(
        f"{f'of {size_name(size)} ' if size else ''}{G * rate:.1f} GB/s"
        for size, rate in roofs["bytes_per_s"]
    )
    loose, whole = (sum(row[key] for row in rows) for key in ("loose_bytes", "num_bytes"))
    return [
        f"{result['model']}, {result['batch_size']} {result['unit']}s; roofs ({roofs['source']}): "
        f"{G * roofs['flops_per_s']:.1f} GFLOP/s in products; copies: {copies}",
        "of the roof: the least possible time, by products or by memory, divided by the measured "
        "time; it is above 100 % where a cache served what is counted as memory, or where an "
        "algorithm multiplies less (Winograd, FFT)",
        "fusable: bytes moved by operations without products (ReLU, pooling, norms) that are next "
        f"to a product of the same layer, {MB * loose:.1f} of {MB * whole:.1f} MB in all",
    ]


def chart(result: dict[str, Any]) -> Drawn:
    """Draw each layer's rate over its operations per byte, under the roofs."""
    rows = [row for row in result["rows"] if row["flops"] and row["seconds"]]
    roofs, named = result["roofs"], _named(rows)
    data: Any = pd.DataFrame(
        {
            "x": row["flops_per_byte"],
            "y": _rate(row),
            "way": row["way"],
            "layer": row["layer"],
            "name": row["layer"] if any(row is each for each in named) else "",
        }
        for row in rows
    )
    fastest = max(rate for _, rate in roofs["bytes_per_s"])
    low = min(float(data["x"].min()), roofs["flops_per_s"] / fastest) / 2
    x_ends = low, 2 * float(data["x"].max())
    y_ends = float(data["y"].min()) / 1.5, 1.6 * max(G * roofs["flops_per_s"], data["y"].max())
    x, y = Axis("operations per byte (FLOP/byte)", log=10), Axis("GFLOP/s", log=10)
    across = alt.X("x:Q", title=x.title, scale=x.scale(x_ends), axis=x.axis(x_ends))
    up = alt.Y("y:Q", title=y.title, scale=y.scale(y_ends), axis=y.axis(y_ends))
    scale = alt.Scale(domain=list(COLOURS), range=list(COLOURS.values()))
    dashes = alt.Scale(domain=list(ROOFS), range=[[1, 0], [6, 3]])
    dots = alt.Chart(data).encode(across, up)
    body = alt.layer(
        alt.Chart(_roofs(roofs, x_ends))
        .mark_line(color=BLACK, clip=True)
        .encode(across, up, alt.StrokeDash("roof:N", scale=dashes), detail="size:N"),
        dots.mark_point(filled=True, size=40, opacity=0.75).encode(
            color=alt.Color("way:N", scale=scale), tooltip=["layer", "way", "x:Q", "y:Q"]
        ),
        dots.mark_text(align="left", dx=6, dy=9, fontSize=LABEL_PX).encode(text="name:N"),
    ).properties(width=SIZE[0], height=SIZE[1])
    least_s = sum(row["of_roof"] * row["seconds"] for row in rows)
    reached = 100 * least_s / sum(row["seconds"] for row in rows)
    message = f"Layers of {result['model']} reach {reached:.0f} % of what the roofs allow"
    sample = f"{threaded(result)} · {result['batch_size']} {result['unit']}s"
    return message, [sample, f"roofs: {roofs['source']}"], (body, SIZE[0] + 50)


def _named(rows: list[Row]) -> list[Row]:
    """Return the longest of each layer's two rows, without those whose names would overlap."""
    longest: dict[str, Row] = {}
    for row in sorted(rows, key=lambda row: -row["seconds"]):
        longest.setdefault(row["layer"], row)
    kept: list[tuple[float, float, Row]] = []
    for row in longest.values():
        x, y = math.log10(row["flops_per_byte"]), math.log10(row["flops"] / row["seconds"])
        if all(abs(x - a) > CLOSE[0] or abs(y - b) > CLOSE[1] for a, b, _ in kept):
            kept.append((x, y, row))
    return [row for *_, row in kept[:NAMED]]


def _roofs(roofs: dict[str, Any], ends: tuple[float, float]) -> Any:
    """Return the corners of each roof: of copies that go to memory, and of those in caches."""
    peak = roofs["flops_per_s"]
    largest = max(size for size, _ in roofs["bytes_per_s"])
    return pd.DataFrame(
        {"x": x, "y": G * min(peak, rate * x), "size": size, "roof": ROOFS[size != largest]}
        for size, rate in roofs["bytes_per_s"]
        for x in sorted({ends[0], min(max(peak / rate, ends[0]), ends[1]), ends[1]})
    )
