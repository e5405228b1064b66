"""Advice as text, first choices first, how to check them, and all options; and as a chart."""

from __future__ import annotations

import math
import textwrap
from typing import Any

import pandas as pd

from lab.advice.advise import KINDS, UNRECORDED
from lab.draw.chart import Chart, looks_of
from lab.draw.plots import Axis, lines
from lab.draw.text import aligned, short_text
from lab.simulate.estimate import ESTIMATE
from lab.simulate.view import open_values

Row = dict[str, Any]
TITLES = {
    "exact": "exact: every step takes the mean of all gradients",
    "lossy": "lossy: gradients are rounded, sparsified, late or exchanged rarely",
}
WIDTH = 110  # letters of a line in words
MOST = 5  # series of a panel: more cannot be told apart


def chart(result: Row) -> Chart:
    """Chart each rank's samples per second over ranks: the best series, at their best's batch."""
    kinds = [kind for kind in KINDS if result["best"][kind]]
    best = {kind: best_rows(result, kind)[:MOST] for kind in kinds}
    data: Any = pd.DataFrame(
        {
            **{"series": row["series"], "panel": kind, "x": row["world_size"], "hollow": True},
            "value": row["samples_per_s"] / row["world_size"],
            "low": row["samples_per_s_interval"][0] / row["world_size"],
            "high": row["samples_per_s_interval"][1] / row["world_size"],
            "alone": best[kind][0]["samples_per_s"]
            / (best[kind][0]["efficiency"] * best[kind][0]["world_size"]),
        }
        for kind in kinds
        for one in best[kind]
        for row in result["rows"]
        if row["series"] == one["series"] and row[_batch_key(one)] == one[_batch_key(one)]
    )
    sizes = sorted(set(data["x"]))
    body, width = lines(
        data,
        Axis("ranks", log=2 if len(sizes) > 1 else 0, ticks=sizes),
        Axis("samples per second per rank"),
        looks_of(data["series"]),
        panels=lambda kind: f"{kind}, {_batch_text(best[kind])}",
        reference="alone",
    )
    first = "; ".join(f"{kind}: {_named(best[kind][0])}" for kind in kinds)
    message = f"Predicted best for {result['target']['text']}, {first}"
    names = f"{', '.join(result['profiles'])} on {result['hardware']['name']}"
    key = [f"hollow: predicted, {names}", "dotted: the first choice at efficiency 1"]
    key += ["vertical: 95 % intervals"] if (data["low"] < data["high"]).any() else []
    num_left_out = sum(len(result["best"][kind]) - len(best[kind]) for kind in kinds)
    left_out = [f"slower series left out: {num_left_out}"] if num_left_out else []
    fitted = [f"fitted to {result['fit']}"] if result["fit"] else []
    return Chart("advice", message, ["; ".join(key), *left_out, *fitted], body, width)


def _batch_key(row: Row) -> str:
    return "per_rank_batch_size" if row["scaling"] == "weak" else "batch_size"


def _batch_text(rows: list[Row]) -> str:
    key = _batch_key(rows[0])
    sizes = ", ".join(map(str, sorted({row[key] for row in rows})))
    return f"{'per-rank' if key.startswith('per') else 'global'} batch {sizes}"


def text(result: Row) -> str:
    """Write first choices, their commands, the best option of each series, and all about them."""
    kinds = [kind for kind in TITLES if result["best"][kind]]
    if not kinds:
        highest = result["most_efficient"]
        nothing = f"no option reaches {result['target']['text']}; the highest is {highest:.2f}"
        if math.isnan(highest):
            nothing = f"no option fits the memory of {result['hardware']['name']}"
        return "\n".join([nothing, "", *_wrapped([*_about(result), *_meanings(result)])])
    blocks = [[line for kind in kinds for line in _first_choice(result, kind)]]
    to_run = (row for kind in kinds for row in _rivals(result, kind)[:2])
    blocks += [["to run:", *(f"  {row['command']}" for row in to_run)]]
    blocks += [_table(result, kind) for kind in kinds]
    blocks += [_accuracies(result), _wrapped([*_about(result), *_meanings(result)])]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _about(result: Row) -> list[str]:
    """Say what was predicted and from what, and what its intervals are of."""
    profiles = ", ".join(
        f"{name} (an estimate)"
        if profile["source"].startswith(ESTIMATE) and ESTIMATE not in name
        else name
        for name, profile in result["profiles"].items()
    )
    hardware = result["hardware"]
    at = f" at {hardware['conditions']}" if hardware["conditions"] else ""
    fitted = f", fitted to {result['fit']}{at}" if result["fit"] else ""
    sources = open_values(result, [hardware])
    return [
        f"predicted: profile {profiles}, hardware {hardware['name']}{fitted}",
        *result["updates"],
        *([f"cells held out of the fit: {result['errors']}"] if result["errors"] else []),
        *([f"no effect on these steps: {', '.join(result['idle'])}"] if result["idle"] else []),
        f"intervals: 95 %, given the uncertainty of {', '.join(sources)}"
        if sources
        else "intervals: none, because no value is uncertain",
    ]


def best_rows(result: Row, kind: str) -> list[Row]:
    """Return the rows to show of a kind: each series' best, the first `top` of them."""
    return [result["rows"][place] for place in result["best"][kind][: result["top"]]]


def _meanings(result: Row) -> list[str]:
    memory = result["hardware"]["memory_bytes"]
    device = f"out of a device's {memory / 1e9:.3g} GB" if memory else "on a device of unknown size"
    too_large = ", ".join(result["too_large"])
    return [
        f"GB: memory of weights, gradients, optimizer and exchange, without activations, {device}",
        *([f"left out, because they need more memory: {too_large}"] if too_large else []),
        "limit: the largest cost, and the percentage of the step time that you would save without "
        "it",
        "knee: the number of ranks from which doubling them speeds up training by a factor of less "
        f"than {result['knee']:g}",
        "with a larger batch, there are fewer updates for the same number of samples; to compare "
        "options at one batch size, set batch_size=...",
    ]


def _table(result: Row, kind: str) -> list[str]:
    rows = best_rows(result, kind)
    cost = "cost" if rows[0]["hours"] is not None else "cost of 1e6 samples"
    extra = {"hours": "hours", "cost": cost}
    extra = {key: name for key, name in extra.items() if rows[0][key] is not None}
    header = ["strategy", "N", "batch", "samples/s", "[95 %]", "step ms", "efficiency"]
    header += [*extra.values(), "GB", "limit", "", "knee"]
    lines = aligned([header, *(_line(row, list(extra)) for row in rows)])
    more = len(result["best"][kind]) - len(rows)
    lines += [f"and {more} more (top=... lists them)"] if more else []
    return [TITLES[kind], *(f"  {line}" for line in lines)]


def _line(row: Row, extra: list[str]) -> list[str]:
    low, high = row["samples_per_s_interval"]
    memory = row["memory_bytes"]
    return [
        *(row["series"], str(row["world_size"]), str(row["batch_size"])),
        *(f"{row['samples_per_s']:.1f}", f"[{low:.1f}, {high:.1f}]" if low < high else ""),
        *(f"{1e3 * row['step_s']:.2f}", f"{row['efficiency']:.2f}"),
        *(short_text(row[key], 4) for key in extra),
        "?" if memory is None else f"{memory / 1e9:.3g}",
        *(row["limit"], f"{100 * row['limit_share']:.0f} %"),
        str(row["knee"] or "-"),
    ]


def _first_choice(result: Row, kind: str) -> list[str]:
    """Name the first choice, and others that are as good for all we know."""
    first, *close = _rivals(result, kind)
    low, high = first["samples_per_s_interval"]
    interval = f" [{short_text(low)}, {short_text(high)}]" if low < high else ""
    rate = f"{short_text(first['samples_per_s'])} samples/s{interval}"
    line = f"first choice, {kind}: {_named(first)}, {rate}"
    names = ", ".join(row["series"] for row in close)
    rivals = f"  measure first, because the prediction cannot distinguish this choice from {names}"
    return [line, *_wrapped([rivals] if close else [])]


def _rivals(result: Row, kind: str) -> list[Row]:
    """Return the first choice, and after it those from which the prediction cannot tell it."""
    places = [result["best"][kind][0], *result["contenders"][kind]]
    return [result["rows"][place] for place in places]


def _named(row: Row) -> str:
    ranks = "1 rank" if row["world_size"] == 1 else f"{row['world_size']} ranks"
    return f"{row['series']} on {ranks}, batch {row['batch_size']}"


def _accuracies(result: Row) -> list[str]:
    """List what accuracies of lossy strategies are known, and name the others."""
    accuracies = {row["series"]: row["accuracy"] for row in best_rows(result, "lossy")}
    known = [f"  {name}: {text}" for name, text in accuracies.items() if text != UNRECORDED]
    unknown = ", ".join(name for name, text in accuracies.items() if text == UNRECORDED)
    known += [f"  {unknown}: {UNRECORDED}"] if unknown else []
    head = "accuracy of lossy strategies: test accuracy in % on digits, 2 ranks, default settings"
    return [head, *known] if known else []


def _wrapped(paragraphs: list[str]) -> list[str]:
    wrapper = textwrap.TextWrapper(WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    return [line for paragraph in paragraphs for line in wrapper.wrap(paragraph)]
