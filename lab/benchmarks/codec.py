"""Rates of encoding, reducing and decoding, as ratios to a memory-bound operation.

That is torch.add(a, b, out=c) on a CPU and a device copy on a GPU, timed right before or after each
operation it is compared with. All tensors are written before anything is timed.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from lab.benchmarks import harness, present
from lab.benchmarks.catalogue import NUM_VALUES, VALUE_BYTES
from lab.benchmarks.compressors import CODECS, IN_TORCH, Compressor, Make, definition_of, maker
from lab.benchmarks.request import BenchRequest
from lab.codec import build
from lab.codec.base import Reference
from lab.codec.codecs import OneBit
from lab.draw.chart import BLUE, GREEN, GREY, INK, LABEL_PX, LETTER, ORANGE, alt
from lab.draw.plots import BARS, round_values
from lab.measure.environment import num_cores
from lab.settings.config import ConfigError

BUDGET_S, FEWEST_ROUNDS = 10.0, 3  # seconds of one operation: a slow one takes part in fewer rounds
TOLERANCE = 1e-6  # relative: a few roundings of float32
COLOURS = {"encode, with any residual": BLUE, "reduce": GREEN, "decode": ORANGE}


@dataclass
class TimedOperation:
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

    def take_turn(self, reference: Callable[[], object], device: torch.device) -> float:
        """Time the operation, and the reference before or after it, by turns; return seconds."""
        first = len(self.call_s) % 2 == 0
        for is_reference in (first, not first):
            call = reference if is_reference else self.run
            took = harness.per_call(call, self.num_calls, device)
            (self.reference_s if is_reference else self.call_s).append(took.call_s)
            if not is_reference and took.host_s is not None:
                self.host_s.append(took.host_s)
        return self.call_s[-1]


def measure(request: BenchRequest) -> dict[str, Any]:
    settings, wanted = request.own, request.config.device
    names = settings["codec"] or list(CODECS)
    makes = {name: maker(name) for name in names}
    device = harness.device_for(wanted)
    num_values = settings["num_values"] or NUM_VALUES[device.type]
    rows = num_values // settings["columns"]
    if rows == 0:
        raise ConfigError(
            f"num_values={num_values}: must be at least columns={settings['columns']}"
        )
    threads, cores = settings["threads"], num_cores()
    shares = device.type == "cpu" and threads > cores
    torch.set_num_threads(threads)
    try:
        measured = _measure_all(makes, (rows, settings["columns"]), device, settings["rounds"])
    except torch.OutOfMemoryError:
        raise ConfigError(f"num_values={num_values}: too many for this GPU's memory") from None
    return {
        **measured,
        "shape": [rows, settings["columns"]],
        "num_values": rows * settings["columns"],
        "device": device.type,
        "cache_bytes": harness.cache_bytes(device),
        "kernels": kernels(device),
        **harness.here(f"{threads} threads share {cores} CPU cores" if shares else "none"),
    }


def _measure_all(
    makes: dict[str, Make], shape: tuple[int, int], device: torch.device, num_rounds: int
) -> dict[str, Any]:
    gradient, residual = torch.randn(shape, device=device), torch.randn(shape, device=device)
    out = torch.ones(shape, device=device)
    codecs = {name: make(*shape, device) for name, make in makes.items()}
    wrong = {
        name: count_wrong(codec, gradient, residual, make and make(*shape, device))
        for name, codec in codecs.items()
        for make in [definition_of(name)]
    }
    together = harness.NUM_CALLS if device.type == "cuda" else 1
    operations = []
    for name, codec in codecs.items():
        calls = partial(codec.encode, gradient, residual), partial(codec.decode, out)
        for kind, call, passes in zip(("encode", "decode"), calls, codec.passes, strict=True):
            moved = passes * VALUE_BYTES * gradient.numel() + codec.payload_bytes
            operations.append(TimedOperation(name, kind, call, moved, together))
        if reduction := codec.reduction():
            operations.insert(-1, TimedOperation(name, "reduce", *reduction, together))
    against, reference_bytes, run = _reference(gradient, residual, out)
    takes = [partial(operation.take_turn, run, device) for operation in operations]
    harness.take_turns(takes, num_rounds, wants=harness.within(BUDGET_S / together, FEWEST_ROUNDS))
    reference_s = [seconds for each in operations for seconds in each.reference_s]
    return {
        "rows": [
            _row(each, reference_bytes, codecs[each.codec].payload_bytes, gradient.numel())
            | {"over_torch": _over_torch(each, operations), "wrong": wrong[each.codec]}
            for each in operations
        ],
        "reference": {"name": against, **_rate(reference_s, reference_bytes)},
    }


def count_wrong(
    codec: Compressor, gradient: Tensor, residual: Tensor, definition: Compressor | None = None
) -> int:
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
    if definition:
        expected = residual.clone()
        definition.encode(gradient, expected)
        num_wrong += _count_far(left, expected, size)
        (exact, near), (true_exact, true_near) = codec.parts(), definition.parts()
        for ours, theirs in zip(exact, true_exact, strict=True):
            num_wrong += sum(int(((ours ^ theirs) >> bit & 1).sum()) for bit in range(8))
        for ours, theirs in zip(near, true_near, strict=True):
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


def _row(
    operation: TimedOperation, reference_bytes: int, payload_bytes: int, num_values: int
) -> dict[str, Any]:
    taken, memory = operation.call_s, operation.reference_s
    share = operation.moved_bytes / reference_bytes
    return {
        "codec": operation.codec,
        "operation": operation.name,
        **_rate(taken, operation.moved_bytes),
        "ratio": harness.ratio(taken, memory),
        "of_bandwidth": harness.interval(lambda t, m: share * m / t, taken, memory),
        "bits_per_value": 8 * payload_bytes / num_values,
        "host_s": harness.middle(operation.host_s)["median"] if operation.host_s else None,
    }


def _over_torch(
    operation: TimedOperation, operations: list[TimedOperation]
) -> dict[str, Any] | None:
    """Return how many times faster an operation is than plain torch's of the same rounds."""
    for other in operations:
        if (other.codec, other.name) == (operation.codec + IN_TORCH, operation.name):
            common = min(len(other.call_s), len(operation.call_s))
            return harness.ratio(other.call_s[:common], operation.call_s[:common])
    return None


def _rate(seconds: list[float], moved_bytes: int) -> dict[str, Any]:
    time_s = harness.middle(seconds)
    return {
        "num_rounds": len(seconds),
        "time_s": time_s,
        "bytes": moved_bytes,
        "gb_per_s": moved_bytes / time_s["median"] / 1e9,
    }


def kernels(device: torch.device) -> dict[str, Any]:
    """Describe the kernels of "onebit": their level, and the compiler that built them."""
    in_torch = type(OneBit().kernels(device)) is Reference  # of which others are subclasses
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
    reference = result["reference"]
    columns = {
        "codec": present.text("codec"),
        "": present.text("operation"),
        "bits/value": present.number("bits_per_value", digits=3, missing=""),
        **present.medians("time (ms)", "time_s", 1e3, 3),
        "GB/s": present.number("gb_per_s", digits=2),
        "ratio": present.intervals("ratio", reference="1"),
        "of bandwidth": present.intervals("of_bandwidth", reference="1"),
        "over torch": lambda row: "" if row is reference else present.ranged(row.get("over_torch")),
        "rounds": present.text("num_rounds"),
        "#wrong": present.text("wrong"),
        **present.host_column(result["rows"]),
    }
    header, first, *lines = present.tabulate([reference, *result["rows"]], columns)
    return [header, [reference["name"], *first[1:]], *lines]


def notes(result: dict[str, Any]) -> list[str]:
    rows, columns = result["shape"]
    return [
        f"{result['num_values']} float32 values, {rows} rows of {columns}; {_engine(result)}",
        f"ratio: time divided by the time of {result['reference']['name']} right before or after, "
        "with 95 % intervals; GB/s: the fewest bytes that must be read and written, divided by the "
        "time; over torch: time of the codec's _reference in the same rounds, divided by the time "
        "of the codec",
        *present.in_cache(result, VALUE_BYTES * result["num_values"]),
    ]


def chart(result: dict[str, Any]) -> present.Drawn:
    """Draw a mark for each operation of each codec: its time over the memory-bound one's."""
    rows, against = result["rows"], result["reference"]["name"]
    encodes = sorted(
        (row["ratio"]["median"], row["codec"])
        for row in rows
        if row["operation"] == "encode" and not row["codec"].endswith(IN_TORCH)
    )
    message = f"Codec times, divided by the time of {against}"
    if encodes:
        ends_ = dict.fromkeys(f"{of:.3g} ({codec})" for of, codec in (encodes[0], encodes[-1]))
        message = f"Encoding takes {' to '.join(ends_)} times as long as {against}"
    rounds = present.span([row["num_rounds"] for row in rows], "")
    about = [
        f"{result['num_values'] / 1e6:.3g} M values · {present.machine(result)} · "
        f"{_engine(result)} · medians of {rounds} interleaved rounds, 95 % bootstrap intervals"
    ]
    names = list(dict.fromkeys(row["codec"] for row in rows))
    body = _marks(rows, names, f"time / time of {against}", result["emulation"] != "none")
    width = int(BARS + LETTER * LABEL_PX * max(map(len, names)) + 40)
    return message, about, (body, width)


def _marks(rows: list[dict[str, Any]], names: list[str], title: str, hollow: bool) -> Any:
    """Draw each ratio with its interval and its number, and a bar from 1 to it."""
    kinds = dict(zip(("encode", "reduce", "decode"), COLOURS, strict=True))
    there = [text for kind, text in kinds.items() if kind in {row["operation"] for row in rows}]
    data: Any = pd.DataFrame(
        {
            **{"name": row["codec"], "operation": kinds[row["operation"]], "one": 1.0},
            **present.ends(row["ratio"]),
            "text": f"{row['ratio']['median']:.3g}",
        }
        for row in rows
    )
    data["behind"] = data[["one", "value", "high"]].max(axis=1)
    low, high = float(data[["one", "value", "low"]].min().min()), float(data["behind"].max())
    domain = min(0.5, low / 1.2), 2 * high
    scale = alt.Scale(type="log", domain=domain, nice=False)
    axis = alt.Axis(values=round_values(*domain), format="~g")
    order = alt.Scale(domain=there, range=[COLOURS[text] for text in there])
    colour: Any = alt.Color("operation:N", scale=order, legend=alt.Legend(symbolOpacity=1))
    base = alt.Chart(data).encode(
        alt.Y("name:N", title=None, sort=names, axis=alt.Axis(labelLimit=420, ticks=False)),
        alt.YOffset("operation:N", sort=there),
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
