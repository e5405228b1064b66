"""Encode and decode rates, as ratios to a memory-bound operation on the same tensors.

That is torch.add(a, b, out=c) on a CPU and a device copy on a GPU, timed right before or after each
operation it is compared with. All tensors are written before anything is timed.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import altair as alt
import pandas as pd
import torch
from torch import Tensor

from lab.benchmarks import interleave
from lab.benchmarks.catalogue import NUM_VALUES, VALUE_BYTES
from lab.benchmarks.compressors import CODECS, IN_TORCH, Codec
from lab.benchmarks.harness import NUM_CALLS, cache_bytes, here, per_call
from lab.benchmarks.present import (
    about,
    ends,
    host_column,
    in_cache,
    machine,
    ranged,
    tabulate,
)
from lab.benchmarks.request import Request
from lab.codec import build
from lab.codec.base import Reference
from lab.codec.codecs import OneBit
from lab.distributed.gpus import check_gpus
from lab.draw.chart import GREY, INK, LABEL_PX, LETTER, Chart
from lab.draw.looks import BLUE, ORANGE
from lab.draw.plots import BARS, round_values
from lab.measure.environment import num_cores
from lab.settings.config import ConfigError

BUDGET_S, FEWEST_ROUNDS = 10.0, 3  # seconds of one operation: a slow one takes part in fewer rounds
TOLERANCE = 1e-6  # relative: a few roundings of float32
COLOURS = {"encode, with any residual": BLUE, "decode": ORANGE}


@dataclass
class Operation:
    """A timed operation, its times, and those of the memory-bound reference next to it.

    Attributes:
        num_calls: number of calls timed together in one turn.
        host_s: time of the host to queue a call; empty on CPUs.
    """

    codec: str
    name: str
    run: Callable[[], None]
    moved_bytes: int
    num_calls: int
    call_s: list[float] = field(default_factory=list)
    reference_s: list[float] = field(default_factory=list)
    host_s: list[float] = field(default_factory=list)

    def wants_turn(self) -> bool:
        return len(self.call_s) < FEWEST_ROUNDS or self.num_calls * sum(self.call_s) < BUDGET_S


def measure(request: Request) -> dict[str, Any]:
    """Measure the requested codecs, and return the result.

    Raises:
        ConfigError: an unknown codec, a missing GPU, or a number of values below that of columns or
            too large for memory.
    """
    settings, wanted = request.own, request.variants[0].config.device
    names = settings["codec"] or list(CODECS)
    for name in names:
        if name not in CODECS:
            raise ConfigError(f"codec={name}: allowed are {', '.join(CODECS)}")
    try:
        device = torch.device("cuda" if check_gpus(wanted, 1) else "cpu")
    except ValueError as error:
        raise ConfigError(str(error)) from None
    num_values = settings["num_values"] or NUM_VALUES[device.type]
    rows = num_values // settings["columns"]
    if rows == 0:
        raise ConfigError(
            f"num_values={num_values}: must be at least columns={settings['columns']}"
        )
    torch.set_num_threads(settings["threads"])
    try:
        measured = _measure_all(names, (rows, settings["columns"]), device, settings["rounds"])
    except torch.OutOfMemoryError:
        raise ConfigError(f"num_values={num_values}: too many for this GPU's memory") from None
    return {
        **measured,
        "shape": [rows, settings["columns"]],
        "num_values": rows * settings["columns"],
        "device": device.type,
        "cache_bytes": cache_bytes(device),
        "kernels": kernels(device),
        **here(_emulation(settings["threads"], device)),
    }


def _measure_all(
    names: list[str], shape: tuple[int, int], device: torch.device, num_rounds: int
) -> dict[str, Any]:
    gradient, residual = torch.randn(shape, device=device), torch.randn(shape, device=device)
    out = torch.ones(shape, device=device)
    codecs = {name: CODECS[name](shape[0], shape[1], device) for name in names}
    wrong = {name: count_wrong(codec, gradient, residual) for name, codec in codecs.items()}
    together = NUM_CALLS if device.type == "cuda" else 1
    operations = []
    for name, codec in codecs.items():
        calls = partial(codec.encode, gradient, residual), partial(codec.decode, out)
        for kind, call, passes in zip(("encode", "decode"), calls, codec.passes, strict=True):
            moved = passes * VALUE_BYTES * gradient.numel() + codec.payload_bytes
            operations.append(Operation(name, kind, call, moved, together))
    against, reference_bytes, run = _reference(gradient, residual, out)
    rounds = interleave.progress(range(num_rounds), 0)
    for index, number in interleave.turns(len(operations), rounds):
        if operations[index].wants_turn():
            _take_turn(operations[index], run, device, reference_first=number % 2 == 0)
    reference_s = [seconds for each in operations for seconds in each.reference_s]
    return {
        "rows": [
            _row(each, reference_bytes, codecs[each.codec].payload_bytes, gradient.numel())
            | {"over_torch": _over_torch(each, operations), "wrong": wrong[each.codec]}
            for each in operations
        ],
        "reference": {"name": against, **_rate(reference_s, reference_bytes)},
    }


def count_wrong(codec: Codec, gradient: Tensor, residual: Tensor) -> int:
    """Count the values that are wrong after one encode and decode.

    With error feedback, decoded values plus the new residual must be gradient plus old residual;
    without, decoded values must be the definition's. Where a codec has a definition, the exact
    parts of its message must be the same bits, and other parts and residuals equal to TOLERANCE.
    """
    left, decoded = residual.clone(), torch.zeros_like(gradient)
    codec.encode(gradient, left)
    codec.decode(decoded)
    true = gradient + residual
    size = true.abs() + decoded.abs()
    num_wrong = _count_far(decoded + left, true, size) if codec.feedback else 0
    if definition := codec.definition():
        expected = residual.clone()
        definition.encode(gradient, expected)
        num_wrong += _count_far(left, expected, size)
        for ours, theirs in zip(codec.exact(), definition.exact(), strict=True):
            num_wrong += sum(int(((ours ^ theirs) >> bit & 1).sum()) for bit in range(8))
        for ours, theirs in zip(codec.near(), definition.near(), strict=True):
            num_wrong += _count_far(ours, theirs, theirs.abs())
        if not codec.feedback:
            redecoded = torch.zeros_like(gradient)
            definition.decode(redecoded)
            num_wrong += _count_far(decoded, redecoded, size)
    return num_wrong


def _count_far(values: Tensor, expected: Tensor, size: Tensor) -> int:
    return int(((values - expected).abs() > TOLERANCE * size).sum())


def _reference(a: Tensor, b: Tensor, c: Tensor) -> tuple[str, int, Callable[[], object]]:
    """Return the memory-bound operation: its name, the bytes it moves, and a call of it."""
    if a.device.type == "cuda":
        return "c.copy_(a)", 2 * a.nbytes, partial(c.copy_, a)
    return "torch.add(a, b, out=c)", 3 * a.nbytes, partial(torch.add, a, b, out=c)


def _take_turn(
    operation: Operation, run: Callable[[], object], device: torch.device, reference_first: bool
) -> None:
    pair = [(operation.reference_s, run), (operation.call_s, operation.run)]
    for seconds, call in pair if reference_first else reversed(pair):
        took = per_call(call, operation.num_calls, device)
        seconds.append(took.call_s)
        if call is operation.run and took.host_s is not None:
            operation.host_s.append(took.host_s)


def _row(
    operation: Operation, reference_bytes: int, payload_bytes: int, num_values: int
) -> dict[str, Any]:
    taken, memory = operation.call_s, operation.reference_s
    share = operation.moved_bytes / reference_bytes
    return {
        "codec": operation.codec,
        "operation": operation.name,
        **_rate(taken, operation.moved_bytes),
        "ratio": interleave.ratio(taken, memory),
        "of_bandwidth": interleave.interval(lambda t, m: share * m / t, taken, memory),
        "bits_per_value": 8 * payload_bytes / num_values,
        "host_s": interleave.middle(operation.host_s)["median"] if operation.host_s else None,
    }


def _over_torch(operation: Operation, operations: list[Operation]) -> dict[str, Any] | None:
    """Return how many times faster an operation is than plain torch's of the same rounds."""
    for other in operations:
        if (other.codec, other.name) == (operation.codec + IN_TORCH, operation.name):
            common = min(len(other.call_s), len(operation.call_s))
            return interleave.ratio(other.call_s[:common], operation.call_s[:common])
    return None


def _rate(seconds: list[float], moved_bytes: int) -> dict[str, Any]:
    middle = interleave.middle(seconds)
    return {
        "num_rounds": len(seconds),
        "time_s": middle,
        "bytes": moved_bytes,
        "gb_per_s": moved_bytes / middle["median"] / 1e9,
    }


def _emulation(threads: int, device: torch.device) -> str:
    cores = num_cores()
    if device.type == "cuda" or threads <= cores:
        return "none"
    return f"{threads} threads share {cores} CPU cores"


def kernels(device: torch.device) -> dict[str, Any]:
    """Describe the kernels of "onebit": their level, and the compiler that built them."""
    in_torch = isinstance(OneBit().kernels(device), Reference)
    if device.type == "cuda":
        level = "plain torch" if in_torch else "Triton"
        return {"level": level, "device": torch.cuda.get_device_name(device)}
    if in_torch:
        return {"level": "plain torch", "compiler": None}
    done = subprocess.run(
        [*build.compiler(), "--version"], capture_output=True, text=True, check=False
    )
    level = torch.backends.cpu.get_cpu_capability()
    return {"level": level, "compiler": done.stdout.partition("\n")[0]}


def table(result: dict[str, Any]) -> list[list[str]]:
    """List a header, a line for the memory-bound operation, and two for each codec."""
    memory = {"codec": result["reference"]["name"], **result["reference"]}
    rows = [memory, *result["rows"]]

    def ratio(row: dict[str, Any], key: str, of_memory: str = "1") -> str:
        return of_memory if row is memory else ranged(row.get(key))  # old results lack one

    return tabulate(
        rows,
        {
            "codec": lambda row: row["codec"],
            "": lambda row: row.get("operation", ""),
            "bits/value": lambda row: "" if row is memory else f"{row['bits_per_value']:.3f}",
            "time (ms)": lambda row: f"{1e3 * row['time_s']['median']:.3f}",
            "mad": lambda row: f"{1e3 * row['time_s']['mad']:.3f}",
            "GB/s": lambda row: f"{row['gb_per_s']:.2f}",
            "ratio": lambda row: ratio(row, "ratio"),
            "of bandwidth": lambda row: ratio(row, "of_bandwidth"),
            "over torch": lambda row: ratio(row, "over_torch", ""),
            "rounds": lambda row: str(row["num_rounds"]),
            "#wrong": lambda row: str(row.get("wrong", "")),
            **host_column(rows),
        },
    )


def notes(result: dict[str, Any]) -> list[str]:
    """Explain the columns."""
    rows, columns = result["shape"]
    return [
        f"{result['num_values']} float32 values, {rows} rows of {columns}; {_engine(result)}",
        f"ratio: of times, to {result['reference']['name']} right before or after, with 95 % "
        "intervals; GB/s: of what must be read and written at least, once; over torch: time of its "
        "_reference in the same rounds over its own",
        *in_cache(result, VALUE_BYTES * result["num_values"]),
    ]


def chart(result: dict[str, Any]) -> Chart:
    """Draw a mark for each operation of each codec: its time over the memory-bound one's."""
    rows, against = result["rows"], result["reference"]["name"]
    encodes = sorted(
        (row["ratio"]["median"], row["codec"])
        for row in rows
        if row["operation"] == "encode" and not row["codec"].endswith(IN_TORCH)
    )
    message = f"Time of codecs, over that of {against}"
    if encodes:
        least, most = (f"{ratio:.3g} ({codec})" for ratio, codec in (encodes[0], encodes[-1]))
        factors = least if least == most else f"{least} to {most}"
        message = f"Encode takes {factors} times as long as {against}"
    counts = sorted({row["num_rounds"] for row in rows})
    rounds = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0])
    lines = [
        f"{result['num_values'] / 1e6:.3g} M values · {machine(result)} · {_engine(result)} · "
        f"medians of {rounds} interleaved rounds, 95 % bootstrap intervals",
        *about(result),
    ]
    names = list(dict.fromkeys(row["codec"] for row in rows))
    body = _marks(rows, names, f"time / time of {against}", result["emulation"] != "none")
    width = int(BARS + LETTER * LABEL_PX * max(map(len, names)) + 40)
    return Chart("codec", message, lines, body, width)


def _marks(rows: list[dict[str, Any]], names: list[str], title: str, hollow: bool) -> Any:
    """Draw each ratio with its interval and its number, and a bar from 1 to it."""
    kinds = dict(zip(("encode", "decode"), COLOURS, strict=True))
    data: Any = pd.DataFrame(
        {
            **{"name": row["codec"], "operation": kinds[row["operation"]], "one": 1.0},
            **ends(row["ratio"]),
            "text": f"{row['ratio']['median']:.3g}",
        }
        for row in rows
    )
    data["behind"] = data[["one", "value", "high"]].max(axis=1)
    low, high = float(data[["one", "value", "low"]].min().min()), float(data["behind"].max())
    domain = min(0.5, low / 1.2), 2 * high
    scale = alt.Scale(type="log", domain=domain, nice=False)
    axis = alt.Axis(values=round_values(*domain), format="~g")
    order = alt.Scale(domain=list(COLOURS), range=list(COLOURS.values()))
    colour: Any = alt.Color("operation:N", scale=order, legend=alt.Legend(symbolOpacity=1))
    base = alt.Chart(data).encode(
        alt.Y("name:N", title=None, sort=names, axis=alt.Axis(labelLimit=420, ticks=False)),
        alt.YOffset("operation:N", sort=list(COLOURS)),
    )
    value = alt.X("value:Q", title=title, scale=scale, axis=axis)
    bar = base.mark_rule(strokeWidth=4, opacity=0.3, strokeCap="butt")
    rule = base.mark_rule(strokeWidth=1.4).transform_filter("isValid(datum.low)")
    point = base.mark_point(size=40, strokeWidth=1.6, opacity=1)
    text = base.mark_text(align="left", dx=6, fontSize=LABEL_PX, color=INK)
    line = alt.Chart(pd.DataFrame({"at": [1.0]})).mark_rule(color=GREY)
    return alt.layer(
        line.encode(alt.X("at:Q", scale=scale)),
        bar.encode(alt.X("one:Q", scale=scale), alt.X2("value:Q"), color=colour),
        rule.encode(alt.X("low:Q", scale=scale), alt.X2("high:Q"), color=colour),
        point.encode(value, stroke=colour, fill=alt.value("white") if hollow else colour),
        text.encode(alt.X("behind:Q", scale=scale), alt.Text("text:N")),
    ).properties(width=BARS, height=30 * len(names))


def _engine(result: dict[str, Any]) -> str:
    kernels, threads = result["kernels"], result["environment"]["num_threads"]
    if result["device"] == "cuda":
        return f"on {kernels['device']}, kernels {kernels['level']}"
    return f"{threads} threads, kernels {kernels['level']} ({kernels['compiler']})"
