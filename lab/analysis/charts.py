"""The charts of a study, from its summary: one row a point, as summary.csv has it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from lab.analysis.sheet import NothingToDraw
from lab.analysis.speedup import CEILING
from lab.draw.chart import Chart
from lab.draw.looks import looks_of, order
from lab.draw.plots import Axis, lines
from lab.measure.intervals import ENOUGH_REPEATS

Frame = Any  # a pandas.DataFrame, and
Point = Any  # a row of it: pandas' own types do not know what columns hold


def speedup(summary: Frame) -> Chart:
    """Chart speedup against ranks: a panel for each batch, a line for each series."""
    points = _known(summary, "speedup_mid", "no 1-rank run to measure speedup from")
    best = _best(points, "speedup_mid")
    message = (
        f"{_lead(points, best)}: {best['speedup_mid']:.2f} × one rank, on {best['world_size']} "
        f"ranks at {_batch_name(best)} {best['fixed_batch_size']}"
    )
    about = [
        f"Speedup over {_baselines(points)}, {best['scaling']} scaling. Dotted: ideal. "
        f"{repeats(points)}."
    ]
    return _over_ranks("speedup", message, about, points, "speedup", ideal="ranks")


def efficiency(summary: Frame) -> Chart:
    """Chart efficiency, speedup divided by ranks."""
    points = _known(summary, "efficiency_mid", "no 1-rank run to measure efficiency from")
    best = _best(points, "efficiency_mid")
    message = (
        f"{best['series']} keeps {100 * best['efficiency_mid']:.0f} % of each rank's speed on "
        f"{best['world_size']} ranks"
    )
    about = [f"Efficiency: speedup / ranks, {best['scaling']} scaling. {repeats(points)}."]
    return _over_ranks("efficiency", message, about, points, "efficiency", ideal="one")


def throughput(summary: Frame) -> Chart:
    """Chart samples per second of all ranks."""
    points = _known(summary, "samples_per_s_mid", "no record gives samples_per_s")
    best, unit = _best(points, "samples_per_s_mid"), _unit(points)
    message = (
        f"{best['series']} trains {best['samples_per_s_mid']:,.0f} {unit}s per second on "
        f"{best['world_size']} ranks"
    )
    about = [f"Throughput of all ranks, {best['scaling']} scaling. {repeats(points)}."]
    return _over_ranks("throughput", message, about, points, "samples_per_s", f"{unit}s per second")


def payload(summary: Frame) -> Chart:
    """Chart the bytes that the busiest rank hands to the network in a step."""
    sent = summary[summary["payload_max_bytes"] > 0].copy()
    if sent.empty:
        raise NothingToDraw("no finished run sent anything")
    for end in ("lo", "mid", "hi"):
        sent[f"payload_{end}"] = sent["payload_max_bytes"] / 1e6 if end == "mid" else math.nan
    last = sent[sent["world_size"] == sent["world_size"].max()]
    most, least = (last.loc[last["payload_mid"].agg(which)] for which in ("idxmax", "idxmin"))
    factor = most["payload_mid"] / least["payload_mid"]
    message = f"{least['series']} sends {factor:.3g} times less than {most['series']}"
    if factor < 1.05:
        message = f"All series send as much: {most['payload_mid']:.3g} MB a step and rank"
    about = ["Payload that the busiest rank hands to the network in a step; counted, not timed."]
    title = "MB a step, busiest rank"
    return _over_ranks("payload", message, about, sent, "payload", title, logarithmic=True)


CHARTS: dict[str, Callable[[Frame], Chart]] = {
    each.__name__: each for each in (speedup, efficiency, throughput, payload)
}


def repeats(points: Frame) -> str:
    """Say how many repeats are behind the points, and what intervals are."""
    counts = sorted(set(points["num_repeats"]))
    text = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    if counts[-1] < ENOUGH_REPEATS:
        return f"{text} repeat{'s' if counts[-1] > 1 else ''} a point: no intervals"
    some = f" where there are {ENOUGH_REPEATS} or more" if counts[0] < ENOUGH_REPEATS else ""
    return f"{text} repeats a point, 95 % t intervals{some}"


def _over_ranks(
    name: str,
    message: str,
    about: Sequence[str],
    points: Frame,
    value: str,
    title: str = "",
    ideal: str = "",
    logarithmic: bool = False,
) -> Chart:
    """Chart columns `value`_lo, _mid and _hi against ranks, in a panel for each batch.

    Args:
        ideal: "ranks": a dotted line of so much, "one": of 1; "": none.
    """
    series = sorted(set(points["series"]), key=order)
    sizes = sorted(set(points["world_size"]))
    # Series are drawn a little beside each other, so that none hides another.
    aside = min(0.16, 0.04 * sizes[-1])
    places = {each: aside * ((at + 0.5) / len(series) - 0.5) for at, each in enumerate(series)}
    data: Frame = pd.DataFrame(
        {
            "series": points["series"],
            "x": points["world_size"],
            "at": points["world_size"] + points["series"].map(places.get),
            "panel": points["fixed_batch_size"],
            "value": points[f"{value}_mid"],
            "low": points[f"{value}_lo"],
            "high": points[f"{value}_hi"],
            "repeats": points["num_repeats"],
            "hollow": points["emulation"] != "none",
        }
    )
    if ideal:
        data[ideal] = data["x"] if ideal == "ranks" else 1.0
    x = Axis("ranks", ticks=sizes, domain=(sizes[0] - 0.4 * aside, sizes[-1] + aside))
    y = Axis(title or value.replace("_", " "), log=10 if logarithmic else 0)
    if not logarithmic:
        top = float(data[["value", "high"]].max().max())
        y = replace(y, domain=(0.0, 1.05 * max(top, 1.0 if ideal else 0.0)))
    batch = _batch_name(points.iloc[0])
    body, width = lines(
        *(data, x, y, looks_of(series), {each: _label(points, each) for each in series}),
        panels=lambda size: f"{batch} {size}",
        reference=ideal,
    )
    emulated = [_emulation(points)] if (points["emulation"] != "none").any() else []
    return Chart(name, message, [*about, *emulated], body, width)


def _known(summary: Frame, column: str, lacking: str) -> Frame:
    found = summary[summary[column].notna()]
    if found.empty:
        raise NothingToDraw(lacking)
    return found


def _best(points: Frame, column: str) -> Point:
    """Return the point of the highest value on the most ranks, of what trains the same model."""
    rivals = points[(points["strategy"] != CEILING) & (points["transform"] == "none")]
    rivals = points if rivals.empty else rivals
    last = rivals[rivals["world_size"] == rivals["world_size"].max()]
    return last.loc[last[column].idxmax()]


def _lead(points: Frame, best: Point) -> str:
    """Name the series of the best point, and those that it was not shown to beat there."""
    place = ["scaling", "world_size", "fixed_batch_size", "transform"]
    here = points[(points[place] == best[place]).all(axis=1) & points["leads"]]
    others = [str(name) for name in here["series"] if name != best["series"]]
    if not best["leads"] or best["num_repeats"] < ENOUGH_REPEATS or len(others) > 3:
        return f"At most, with {best['series']}"
    if others:
        return f"{', '.join([best['series'], *others])} lead, not told apart"
    return f"{best['series']} is fastest"


def _baselines(points: Frame) -> str:
    names = sorted({str(name).split(" ")[0] for name in points["baseline"]})
    own = (points["baseline"] == points["series"]).all() and len(names) > 1
    return "each series' own 1-rank run" if own else f"{' or '.join(names)} on 1 rank"


def _batch_name(point: Point) -> str:
    return "global batch" if point["scaling"] == "strong" else "per-rank batch"


def _label(points: Frame, series: str) -> str:
    one = points[points["series"] == series].iloc[0]
    if one["strategy"] == CEILING:
        return f"{series} (ceiling)"
    return series if one["transform"] == "none" else f"{series} (another model)"


def _unit(points: Frame) -> str:
    units = set(points["unit"])
    return units.pop() if len(units) == 1 else "sample"


def _emulation(points: Frame) -> str:
    how = sorted(set(points["emulation"]) - {"none"})
    return f"Hollow: emulated ({'; '.join(how)})."
