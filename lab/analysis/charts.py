"""The charts of a study, from its summary: one row a point, as summary.csv has it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import altair as alt
import pandas as pd

from lab.analysis.sheet import NothingToDraw
from lab.analysis.speedup import CEILING
from lab.draw.chart import GREY, LABEL_PX, LETTER, Chart, look_of_series, spread
from lab.draw.looks import looks_of, order
from lab.measure.intervals import ENOUGH_REPEATS

PANEL, MOST_COLUMNS, GAP = 240, 4, 18  # pixels of a panel, panels beside each other, between them
LABEL_ROOM = 150  # pixels beside a panel for the names of its lines
NAMED_COLUMNS = 2  # panels with names beside each other
MOST_LABELLED = 9  # lines whose names fit beside a panel

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
    labels = {each: _label(points, each) for each in series}
    looks = looks_of(series)
    sizes, batches = sorted(set(points["world_size"])), sorted(set(points["fixed_batch_size"]))
    aside = min(0.16, 0.04 * sizes[-1])
    places = {each: aside * ((at + 0.5) / len(series) - 0.5) for at, each in enumerate(series)}
    data: Frame = pd.DataFrame(
        {
            "series": points["series"].map(labels.get),
            "ranks": points["world_size"],
            "x": points["world_size"] + points["series"].map(places.get),
            "batch": points["fixed_batch_size"],
            "value": points[f"{value}_mid"],
            "low": points[f"{value}_lo"],
            "high": points[f"{value}_hi"],
            "repeats": points["num_repeats"],
            "emulated": points["emulation"] != "none",
        }
    )
    named = len(series) <= MOST_LABELLED
    top = float(max(data["value"].max(), data["high"].max(skipna=True) or 0))
    low = float(data["value"].min()) / 1.3 if logarithmic else 0.0
    high = 1.3 * top if logarithmic else 1.05 * max(top, 1.0 if ideal else 0.0)
    scale = alt.Scale(type="log" if logarithmic else "linear", domain=[low, high], nice=False)
    x = alt.X("x:Q", title="ranks").axis(values=sizes, format="d", grid=False)
    x = x.scale(domain=[sizes[0] - 0.4 * aside, sizes[-1] + aside], nice=False, padding=6)
    y = alt.Y("value:Q", title=title or value.replace("_", " "), scale=scale)
    if logarithmic:
        y = y.axis(values=_round_values(low, high), format="~g")
    look = look_of_series(looks, labels)
    if not named:
        look["color"] = look["color"].legend(columns=_legend_columns(labels.values()))
    base = alt.Chart()
    tooltip = ["series:N", "ranks:Q", "batch:Q", "value:Q", "low:Q", "high:Q", "repeats:Q"]
    layers: list[Any] = []
    if ideal:
        line = base.mark_line(color=GREY, strokeDash=[2, 3], strokeWidth=1.2, clip=True)
        layers.append(line.encode(x="ranks:Q", y=f"{'ranks' if ideal == 'ranks' else 'one'}:Q"))
        data["one"] = 1.0
    layers += [
        base.mark_line(strokeWidth=1.8).encode(x, y, **look),
        base.mark_rule(strokeWidth=1.4)
        .transform_filter("isValid(datum.low)")
        .encode(x, alt.Y("low:Q", scale=scale), alt.Y2("high:Q"), color=look["color"]),
        base.mark_point(size=46, strokeWidth=1.6, opacity=1).encode(
            x,
            y,
            stroke=look["color"],
            fill=alt.condition("datum.emulated", alt.value("white"), look["color"]),
            tooltip=tooltip,
        ),
    ]
    if named:
        data = pd.concat([data, _ends(data, low, high, logarithmic)])
        layers.append(_names(base, look, scale))
    columns = min(len(batches), NAMED_COLUMNS if named else MOST_COLUMNS)
    panel = alt.layer(*layers).properties(width=PANEL, height=PANEL)
    header = alt.Header(labelExpr=f"'{_batch_name(points.iloc[0])} ' + datum.value", title=None)
    facet = alt.Facet("batch:O", title=None, sort=batches, header=header)
    body = panel.properties(data=data).facet(facet=facet, columns=columns, spacing=GAP)
    width = columns * (PANEL + (LABEL_ROOM if named else GAP)) + 40
    emulated = [_emulation(points)] if (points["emulation"] != "none").any() else []
    return Chart(name, message, [*about, *emulated], body, width)


def _names(base: alt.Chart, look: dict[str, Any], scale: alt.Scale) -> alt.Chart:
    """Write each line's name at its end."""
    shown = base.transform_filter("isValid(datum.name)")
    text = shown.mark_text(align="left", dx=9, fontSize=LABEL_PX, clip=False)
    return text.encode(
        alt.X("x:Q"), alt.Y("end:Q", scale=scale), alt.Text("name:N"), color=look["color"]
    )


def _ends(data: Frame, low: float, high: float, logarithmic: bool) -> Frame:
    """Return a row for the last point of each line, where its name is written: x, end and name."""
    last = data.loc[data.groupby(["batch", "series"])["ranks"].idxmax()]
    gap = (LABEL_PX + 3) / PANEL
    rows: list[Frame] = []
    for _, panel in last.groupby("batch"):
        values = [float(value) for value in panel["value"]]
        if logarithmic:
            reach = math.log(high / low)
            ends = [
                low * math.exp(v) for v in spread([math.log(v / low) for v in values], gap * reach)
            ]
        else:
            ends = spread(values, gap * (high - low))
        names = panel["series"]
        rows.append(panel[["series", "batch"]].assign(x=data["x"].max(), end=ends, name=names))
    return pd.concat(rows)


def _round_values(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 times powers of ten between two values."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [v for d in decades for v in (10.0**d, 2 * 10.0**d, 5 * 10.0**d) if low <= v <= high]


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


def _legend_columns(labels: Any) -> int:
    longest = max(map(len, labels))
    return max(1, min(4, int(4 * PANEL / (LETTER * LABEL_PX * longest + 40))))
