"""Copies between host and device, read from a trace, next to published ones."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd

from lab.benchmarks.present import Drawn, Row, decimals
from lab.benchmarks.request import Request
from lab.device.trace import SIZES, about_trace, copies_of, left_out, read_events, read_from
from lab.draw.chart import BLUE, GREY, LABEL_PX, SKY, alt
from lab.draw.plots import BARS, bars
from lab.settings.config import ConfigError

CALL = re.compile(r"(?:cuda|cu|hip)Memcpy\w*")
MB, GB, MS = 1e-6, 1e-9, 1e3
COLUMNS = ("< 1 kB", "< 10 kB", "< 100 kB", "< 1 MB", "< 10 MB", "more")
HEADER = ["", "memories", "copies", "MB", "kB each", "GB/s", "ms", "hidden %", *COLUMNS]
# Review of frameworks by NVIDIA (2017), slides 12 and 13: ten iterations on CIFAR-10. Slide 12
# prints 3.005 MB/s for the copies on the device; its own bytes over its time are 3.005 GB/s.
PUBLISHED = (
    ("HtoD", "published: TensorFlow", 107_912, 123.256e6, 221.538e-3),
    ("DtoH", "published: TensorFlow", 107_883, 220.186e6, 151.341e-3),
    ("DtoD", "published: TensorFlow", 64_615, 258.46e6, 86.024e-3),
    ("HtoD", "published: Caffe", 379, 172.955e6, 15.045e-3),
    ("DtoH", "published: Caffe", 571, 17.973e6, 2.283e-3),
    ("DtoD", "published: Caffe", 450, 508.779e6, 2.51e-3),
)


def measure(request: Request) -> dict[str, Any]:
    """Add up the copies of the trace `trace=FILE`."""
    path: Path | None = request.own["trace"]
    if path is None:
        raise ConfigError(
            "trace=null: must be a trace of torch.profiler or Chrome, .json or .json.gz"
        )
    events = read_events(path)
    skipped: Counter[str] = Counter()
    found = copies_of(events, skipped)
    if not found:
        raise ConfigError(
            f"trace={path}: holds no copies between host and device{_why(events, skipped)}"
        )
    return {"rows": [asdict(each) for each in found], **read_from(path, events, skipped)}


def _why(events: Sequence[Mapping[str, Any]], skipped: Mapping[str, int]) -> str:
    """Return why no copy was found, to follow that none was."""
    if any(reason.startswith("copies") for reason in skipped):
        return f" that can be read; left out: {left_out(skipped)}"
    calls = Counter(name for event in events if CALL.fullmatch(name := str(event.get("name"))))
    if calls:
        name, number = calls.most_common(1)[0]
        return (
            f": it has the host's calls ({number} of {name}), not what the device did; record "
            "ProfilerActivity.CUDA too"
        )
    return (
        " (no events of category gpu_memcpy, as Kineto's, named MemcpyH2D, as XLA's, or "
        "CopyHostToDevice, as ROCm's); a run on CPUs makes none"
    )


def table(result: dict[str, Any]) -> list[list[str]]:
    """List a header, a line for each kind of copy, and the published ones."""
    return [HEADER, *map(_line, result["rows"]), *(_published(*each) for each in PUBLISHED)]


def _line(row: Row) -> list[str]:
    hidden = decimals(row["hidden_s"] / row["seconds"] if row["seconds"] else None, 100)
    first = _figures(row["invocations"], row["num_bytes"], row["seconds"])
    return [row["direction"], row["kind"], *first, hidden, *map(str, row["sizes"])]


def _published(direction: str, source: str, *figures: Any) -> list[str]:
    return [direction, source, *_figures(*figures), *[""] * (len(SIZES) + 2)]


def _figures(invocations: int, num_bytes: float, seconds: float) -> list[str]:
    return [
        str(invocations),
        f"{MB * num_bytes:.3f}",
        f"{1e-3 * num_bytes / invocations:.2f}",
        decimals(num_bytes / seconds if seconds else None, GB, 3),
        f"{MS * seconds:.3f}",
    ]


def notes(result: dict[str, Any]) -> list[str]:
    """Explain the columns."""
    events, *skipped = about_trace(result)
    return [
        f"{events}; hidden: while a kernel ran on the same device",
        *skipped,
        "published: NVIDIA's review of frameworks, slides 12 and 13, ten iterations on CIFAR-10, "
        "on another GPU; compare sizes and numbers of copies, not times",
    ]


def chart(result: dict[str, Any]) -> Drawn:
    """Draw the time of copies, hidden and exposed, and below it how many there are by size."""
    rows = result["rows"]
    names = [f"{row['direction']} {row['kind']}" for row in rows]
    parts = pd.DataFrame(
        {"name": name, "part": part, "value": MS * value}
        for name, row in zip(names, rows, strict=True)
        for part, value in (
            ("exposed", row["seconds"] - row["hidden_s"]),
            ("behind kernels", row["hidden_s"]),
        )
    )
    times, width = bars(parts, "time of copies (ms)", {"exposed": BLUE, "behind kernels": SKY})
    body = alt.vconcat(times, _counts(names, rows)).resolve_scale(color="independent")
    whole_s = sum(row["seconds"] for row in rows)
    hidden = 100 * sum(row["hidden_s"] for row in rows) / whole_s if whole_s else 0.0
    message = f"Copies take {MS * whole_s:.3g} ms, {hidden:.0f} % of it behind kernels"
    return message, about_trace(result), (body, width)


def _counts(names: Sequence[str], rows: Sequence[Row]) -> Any:
    """Write the number of copies of each kind and size, on darker squares where there are more."""
    data = pd.DataFrame(
        {"name": name, "size": size, "copies": number}
        for name, row in zip(names, rows, strict=True)
        for size, number in zip(COLUMNS, row["sizes"], strict=True)
        if number
    )
    sizes, kinds = alt.Scale(domain=list(COLUMNS)), alt.Scale(domain=list(names))
    x = alt.X("size:N", title="size of a copy, and how many", sort=COLUMNS, scale=sizes)
    x = x.axis(labelAngle=0)
    y = alt.Y("name:N", title=None, sort=list(names), scale=kinds, axis=alt.Axis(ticks=False))
    base = alt.Chart(data).encode(x, y)
    shade = alt.Opacity("copies:Q", legend=None, scale=alt.Scale(type="log", range=[0.15, 0.5]))
    return alt.layer(
        base.mark_rect(color=GREY).encode(shade),
        base.mark_text(fontSize=LABEL_PX).encode(alt.Text("copies:Q", format=",")),
    ).properties(width=BARS, height=24 * len(names))
