"""The charts of a study, from its summary: one row a point, as summary.csv has it.

Each function takes the points of one scaling, the looks of all series, and the chart's width in
pixels.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import pandas as pd

from lab.analysis.points import CEILING
from lab.draw.chart import (
    BLUE,
    GREEN,
    GREY,
    INK,
    LABEL_PX,
    LETTER,
    SKY,
    VERMILLION,
    WIDTH,
    Chart,
    Look,
    alt,
    wrap,
)
from lab.draw.plots import GAP, Axis, bars, fitted, in_rows, joined, lines
from lab.draw.text import in_words, number_of, number_text, short_text
from lab.measure import PHASES
from lab.measure.statistics import ENOUGH_REPEATS, Interval
from lab.task import heading

Frame = Any  # a pandas.DataFrame, and
Point = Any  # a row of it: pandas' own types do not know what columns hold
Looks = Mapping[str, Look]

MOST_LETTERS = 60  # of names in a title
NUMBER = re.compile(r"(?<![\w.])\d+(?![\w.])")  # on its own, so no part of a name
LOW, HIGH = 150, 190  # pixels of panels of bars, and of curves, from bottom to top
PHASE_LOOKS: dict[str, str] = dict(zip(PHASES, (GREY, SKY, BLUE, VERMILLION, GREEN), strict=True))
CEILING_PART, EXPOSED_PART = "step with strategy=none (ceiling)", "exposed exchange"
WHOLE_PART = "whole step (no strategy=none run)"
PART_LOOKS = {CEILING_PART: BLUE, EXPOSED_PART: VERMILLION, WHOLE_PART: "#C8C8C8"}


class NothingToDraw(ValueError):
    """Raised if a chart's data are missing; the text says which."""


def speedup_bars(summary: Frame, looks: Looks, width: int = WIDTH) -> Chart:
    """Chart speedup: a panel for each series, a group of bars for each batch, one a world size.

    The layout is that of H. Kim et al., "Performance Analysis of CNN Frameworks for GPUs",
    ISPASS 2017, slide 26.
    """
    points = _with_speedup(summary)
    series = [name for name in looks if name in set(points["series"])]
    columns, (wide, high) = fitted(len(series), GAP, width, LOW)
    titles = {name: "|".join(_panel_title(summary, points, name, wide)) for name in series}
    data: Frame = pd.DataFrame(
        {
            "series": points["series"].map(titles.get),
            "batch": points["fixed_batch_size"],
            "ranks": points["world_size"],
            **_interval(points, "speedup"),
            "repeats": points["num_repeats"],
            "pale": _unlike(points),
        }
    )
    shades = alt.Scale(scheme=alt.SchemeParams("blues", extent=[0.35, 1.0]))
    legend = alt.Legend(title="ranks", orient="bottom", titleOrient="left")
    base = alt.Chart().encode(
        alt.X("batch:O", title=_batch_of(points.iloc[0]), axis=alt.Axis(labelAngle=0)),
        xOffset=alt.XOffset("ranks:O"),
    )
    panel = alt.layer(
        base.mark_bar(stroke=INK, strokeWidth=0.5).encode(
            alt.Y("value:Q", title="speedup"),
            alt.Color("ranks:O", scale=shades, legend=legend),
            opacity=alt.condition("datum.pale", alt.value(0.45), alt.value(1.0)),
            tooltip=["batch:O", "ranks:O", "value:Q", "low:Q", "high:Q", "repeats:Q"],
        ),
        base.mark_rule(color=INK, strokeWidth=1.4)
        .transform_filter("isValid(datum.low)")
        .encode(alt.Y("low:Q"), alt.Y2("high:Q")),
        alt.Chart().mark_rule(color=INK).encode(alt.YDatum(1)),
    ).properties(data=data, width=wide, height=high)
    header = alt.Header(labelExpr="split(datum.value, '|')", labelPadding=4)
    body = in_rows(panel, "series", [*titles.values()], columns, header=header)
    about = [f"Speedup over {baselines(points)}, {_scaling(points)}. {repeats(points)}."]
    notes = _notes(points, "Pale")
    return Chart("speedup_bars", _fastest(points), about, body, width, notes)


def scaling(summary: Frame, looks: Looks, width: int = WIDTH) -> Chart:
    """Chart speedup above efficiency, against ranks."""
    both = [speedup(summary, looks, width), efficiency(summary, looks, width)]
    body = joined([each.body for each in both], 1, 2 * GAP)
    return replace(both[0], name="scaling", body=body, about=[*both[0].about, *both[1].about[:1]])


def speedup(summary: Frame, looks: Looks, width: int = WIDTH) -> Chart:
    """Chart speedup against ranks: a panel for each batch, a line for each series."""
    points = _with_speedup(summary)
    about = [
        f"Speedup over {baselines(points)}, {_scaling(points)}. Dotted: ideal. {repeats(points)}."
    ]
    drawn = _over_ranks(points, looks, width, "speedup", ideal="ranks")
    return Chart("speedup", _fastest(points), about, *drawn, _notes(points))


def efficiency(summary: Frame, looks: Looks, width: int = WIDTH) -> Chart:
    """Chart efficiency, speedup divided by ranks."""
    points = _with_speedup(summary)
    best = _best(points, "efficiency_mid")
    message = (
        f"With {best['label']}, {_ranks(best)} keep {100 * best['efficiency_mid']:.0f} % of one "
        "rank's speed each"
    )
    about = [f"Efficiency: speedup / ranks, {_scaling(points)}. {repeats(points)}."]
    drawn = _over_ranks(points, looks, width, "efficiency", ideal="one")
    return Chart("efficiency", message, about, *drawn, _notes(points))


def throughput(summary: Frame, looks: Looks, width: int = WIDTH) -> Chart:
    """Chart samples per second of all ranks."""
    points = _known(_from_one_rank(summary), "samples_per_s_mid", "no record has samples_per_s")
    best, unit = _best(points, "samples_per_s_mid"), _shared(points, "unit", "sample")
    rate, each = best["samples_per_s_mid"], _shared(points, "predictions_per_sample", 1)
    more = f" ({number_text(rate * each)} {best['prediction']}s)" if each > 1 else ""
    verb = "trains" if best["world_size"] == 1 else "train"
    trained = f"{number_text(rate)} {unit}s{more} per second"
    message = f"With {best['label']}, {_ranks(best)} {verb} {trained}"
    about = [f"Throughput of all ranks, {_scaling(points)}. {repeats(points)}."]
    about += [f"A {unit} has {each} {best['prediction']}s."] if each > 1 else []
    drawn = _over_ranks(points, looks, width, "samples_per_s", f"{unit}s per second")
    return Chart("throughput", message, about, *drawn, _notes(points))


def step_time(summary: Frame, looks: Looks, width: int = WIDTH) -> Chart:
    """Chart a step's parts: a bar for each series and number of ranks, a panel for each batch.

    Parts are phases if the study has breakdown runs; else, from its throughput runs, the step of
    `none` and the time that the strategy adds to it, with the interval of this difference.
    """
    phases = [f"{name}_s" for name in PHASES if f"{name}_s" in summary]
    if phases and bool(summary[phases].notna().any(axis=None)):
        points = summary[summary[phases].notna().any(axis=1)]
        parts = {name: points[f"{name}_s"] for name in PHASES}
        parts[EXPOSED_PART] = parts.pop("exchange")
        colours = {EXPOSED_PART if k == "exchange" else k: v for k, v in PHASE_LOOKS.items()}
        step_s = points[phases].sum(axis=1)
        counts = sorted(set(points["num_breakdowns"]))
        count = " to ".join(map(str, sorted({counts[0], counts[-1]})))
        runs = f"Medians of {count} breakdown runs per point, so no intervals"
        if counts == [1]:
            runs = "1 breakdown run per point, so no intervals"
        what = f"A step by its phases, {_scaling(points)}."
        low = high = is_noise = None
    else:
        points = _known(summary, "step_s", "no finished throughput run")
        low, parts, high = _exposed_parts(points)
        colours, step_s, runs = PART_LOOKS, points["step_s"], repeats(points)
        if parts[CEILING_PART].isna().all():
            raise NothingToDraw(
                "there is no breakdown run, and no strategy=none run to compare with"
            )
        what = f"Steps: the step with strategy=none, and the exposed exchange, {_scaling(points)}."
        is_noise = points["exposed_exchange_s_lo"] <= 0
    shares = (parts[EXPOSED_PART] / step_s)[points["strategy"] != CEILING]
    unlike = _unlike(points)
    places = sorted(_told_once(points), key=lambda at: _place(points.loc[at], looks))
    name = {at: f"{points['label'][at]}  N={points['world_size'][at]}" for at in places}
    data: Frame = pd.DataFrame(
        {
            **{"name": name[at], "part": part, "value": 1e3 * values[at]},
            **{"panel": points["fixed_batch_size"][at], "hollow": unlike[at]},
            **{"low": math.nan if low is None else 1e3 * low[at]},
            **{"high": math.nan if high is None else 1e3 * high[at]},
            **({"command": points["command"][at]} if "command" in points else {}),
        }
        for at in places
        for part, values in parts.items()
        if not math.isnan(values[at])
    )
    count = data["panel"].nunique()
    room = LETTER * LABEL_PX * max(map(len, name.values()))
    columns, (wide, _) = fitted(count, GAP, max(int(width - room) + 2 * GAP, width // 2), 0)
    batch, used = _batch_of(points.iloc[0]), set(data["part"])
    body, _ = bars(
        *(data, "step time (ms)", {k: v for k, v in colours.items() if k in used}),
        width=wide,
        panels=lambda size: f"{batch} {size}",
        columns=columns,
    )
    notes = _notes(points, "Pale")
    message = _exposed(points, shares, is_noise)
    return Chart("step_time", message, [f"{what} {runs}."], body, width, notes)


def payload(summary: Frame, looks: Looks, width: int = WIDTH) -> Chart:
    """Chart the bytes that the busiest rank hands to the network in a step, beside an fp32 ring's.

    A rank of a ring all-reduce sends 2(N-1)/N of the gradient: 8n(N-1)/N bytes for n fp32
    parameters (P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms", 2009).
    """
    sent = summary[summary["payload_max_bytes"] > 0].sort_values("fixed_batch_size")
    if sent.empty:
        raise NothingToDraw("no finished run sent anything")
    sent = sent.drop_duplicates(["series", "world_size"], keep="last").sort_values("world_size")
    most_mb, least_mb = sent["payload_max_bytes"] / 1e6, sent["payload_min_bytes"] / 1e6
    differ = (least_mb > 0) & (least_mb < most_mb)
    ends = {"payload_lo": least_mb.where(differ), "payload_hi": most_mb.where(differ)}
    parameters = float(sent["num_parameters"].max())
    ring_mb = 8e-6 * parameters * (1 - 1 / sent["world_size"])
    sent = sent.assign(payload_mid=most_mb, **ends, ring=ring_mb.where(ring_mb > 0))
    last = sent[sent["world_size"] == sent["world_size"].max()]
    most, least = (last.loc[last["payload_mid"].agg(which)] for which in ("idxmax", "idxmin"))
    factor = most["payload_mid"] / least["payload_mid"]
    message = (
        f"A rank sends {short_text(factor)} times as many bytes with {most['label']} as with "
        f"{least['label']}"
    )
    sends = f"A rank sends {short_text(most['payload_mid'])} MB per step"
    if factor < 1.05:
        message = f"{sends} with every series"
    if last["series"].nunique() == 1:
        message = f"{sends} with {most['label']}"
    about = ["Payload that the busiest rank hands to the network in a step; counted, not timed."]
    several = summary[summary["world_size"] > 1]
    if missing := {*several["label"][several["payload_max_bytes"].isna()]} - {*sent["label"]}:
        about.append(f"Not counted: {in_words(sorted(missing))}.")
    ring = f"a ring in fp32, 8n(N−1)/N bytes; n = {short_text(1e-6 * parameters)} M parameters"
    ranges = ["Lines: range from the least to the most loaded rank."] if differ.any() else []
    if sent["world_size"].nunique() == 1:
        about[0] += f" {number_of(sent['world_size'].iloc[0], 'rank')}."
        about += [f"Mark: {ring}.", *ranges] if parameters > 0 else ranges
        drawn = _payload_bars(sent, looks, width, parameters > 0)
    else:
        about += [f"Dotted: {ring}.", *ranges] if parameters > 0 else ranges
        drawn = _over_ranks(
            *(sent, looks, width, "payload", "MB per step, busiest rank"),
            ideal="ring" if parameters > 0 else "",
            logarithmic=True,
        )
    return Chart("payload", message, about, *drawn, _notes(sent))


def _payload_bars(sent: Frame, looks: Looks, width: int, has_ring: bool) -> tuple[Any, int]:
    """Draw a bar for each series: over one number of ranks there is no line."""
    sent = sent.assign(place=sent["series"].map(list(looks).index)).sort_values("place")
    data: Frame = pd.DataFrame(
        {
            **{"name": [_label(sent, each) for each in sent["series"]], "part": "sent"},
            **{key: [*one] for key, one in _interval(sent, "payload").items()},
            **{"text": [f"{short_text(mb)} MB" for mb in sent["payload_mid"]]},
            **{"hollow": [*_unlike(sent)]},
            **({"mark": [*sent["ring"]]} if has_ring else {}),
        }
    )
    wide = max(width // 2, int(width - LETTER * LABEL_PX * max(map(len, data["name"])) - 40))
    title = "MB per step, busiest rank"
    return bars(data, title, {"sent": BLUE}, marks="a ring in fp32", width=wide)


CHARTS: dict[str, Callable[[Frame, Looks, int], Chart]] = {
    each.__name__: each
    for each in (speedup_bars, scaling, speedup, efficiency, throughput, step_time, payload)
}


def repeats(points: Frame) -> str:
    """Say how many repeats are behind the points, and what intervals are."""
    counts = sorted(set(points["num_repeats"]))
    text = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    if counts[-1] < ENOUGH_REPEATS:
        return f"{text} repeat{'s' if counts[-1] > 1 else ''} per point, so no intervals"
    some = f" where there are {ENOUGH_REPEATS} or more" if counts[0] < ENOUGH_REPEATS else ""
    return f"{text} repeats per point, 95 % t intervals{some}"


def baselines(points: Frame) -> str:
    """Name the baselines of the speedup."""
    own = points["baseline"] == points["series"]
    if own.all() and points["strategy"].nunique() > 1:
        return "each series' own 1-rank run"
    names = {str(name).split(" ")[0] for name in points["baseline"]}
    changed = set(points["strategy"][own & (points["transform"] != "none")])
    named = f"{' or '.join(sorted(names - changed or names))} on 1 rank"
    rest = f" ({', '.join(sorted(changed))}: its own)" if changed and names - changed else ""
    return named + rest


def _over_ranks(
    points: Frame,
    looks: Looks,
    width: int,
    value: str,
    title: str = "",
    ideal: str = "",
    logarithmic: bool = False,
) -> tuple[Any, int]:
    """Draw columns `value`_lo, _mid and _hi against ranks, in a panel for each batch.

    Args:
        ideal: "ranks": a dotted line of so much, "one": of 1, or a column; "": none.
    """
    series = [name for name in looks if name in set(points["series"])]
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
            **_interval(points, value),
            "repeats": points["num_repeats"],
            "hollow": _unlike(points),
            **({"command": points["command"]} if "command" in points else {}),
        }
    )
    if ideal:
        data[ideal] = {"ranks": data["x"], "one": 1.0}.get(ideal, points.get(ideal))
    beyond = aside if len(sizes) > 1 else 0.5  # points of one size stay beside each other
    x = Axis("ranks", ticks=sizes, domain=(sizes[0] - 0.5 * beyond, sizes[-1] + beyond))
    y = Axis(title or value, log=10 if logarithmic else 0)
    ends: Frame = data[["value", "low", "high", *([ideal] if logarithmic and ideal else [])]]
    low, high = float(ends.min().min()), float(ends.max().max())
    above = 1.05 * max(high, 1.0 if ideal else 0.0)
    y = replace(y, domain=(low / 1.3, 1.3 * high) if logarithmic else (0.0, above))
    batch = _batch_of(points.iloc[0])
    return lines(
        *(data, x, y, {each: looks[each] for each in series}),
        {each: _label(points, each) for each in series},
        panels=lambda size: f"{batch} {size}",
        reference=ideal,
        width=width,
    )


def _exposed_parts(points: Frame) -> tuple[Any, dict[str, Any], Any]:
    """Return the lower ends of steps, their parts, and their upper ends, in seconds."""
    step_s, mid = points["step_s"], points["exposed_exchange_s_mid"]
    alone = points["strategy"] == CEILING
    # A strategy may come out faster than the ceiling by noise: the bar then ends at its own step.
    shown = mid.clip(lower=0.0).where(~alone)
    parts = {
        CEILING_PART: (step_s - shown).where(~alone, step_s),
        EXPOSED_PART: shown,
        WHOLE_PART: step_s.where(~alone & mid.isna()),
    }
    low, high = (
        (step_s - mid + points[f"exposed_exchange_s_{end}"]).where(~alone) for end in ("lo", "hi")
    )
    return low.clip(lower=0.0), parts, high  # an interval of t may reach below any time


def _told_once(points: Frame) -> list[int]:
    """List the points to draw: on one rank all strategies compute as `none` does."""
    ceiling = (points["strategy"] == CEILING) & (points["world_size"] == 1)
    copies = (points["world_size"] == 1) & ~ceiling
    drawn = points[~copies] if ceiling.any() and not copies.all() else points
    return [*drawn.index]


def _exposed(points: Frame, shares: Any, is_noise: Any) -> str:
    """Say how much of the steps on the most ranks, of those where it is known, is exposed exchange.

    Args:
        is_noise: by point, whether the interval of the exposed exchange includes 0; None: unknown.
    """
    sizes = points["world_size"]
    if ((sizes == 1) | (points["strategy"] == CEILING)).all():
        return "A step without any exchange"
    of_all = shares[sizes > 1].dropna().clip(lower=0.0)
    if of_all.empty:
        return "The exposed exchange of these steps is not known"
    size = sizes[of_all.index].max()
    known = of_all[sizes[of_all.index] == size]
    least, most = (_named(points.loc[known.index], known.agg(at)) for at in ("idxmin", "idxmax"))
    low, high = f"{100 * known.min():.0f}", f"{100 * known.max():.0f}"
    range_ = f"{low} %" if low == high else f"{low} % ({least}) to {high} % ({most})"
    if is_noise is not None and is_noise[known.index].all():
        return f"On {size} ranks, exposed exchange is not significantly above 0: {range_} of a step"
    return f"On {size} ranks, exposed exchange is {range_} of a step"


def _named(points: Frame, at: Any) -> str:
    """Name one of several points by that in which they differ: series, batch, or both."""
    one = points.loc[at]
    names = [one["label"]] if points["series"].nunique() > 1 else []
    if points["fixed_batch_size"].nunique() > 1:
        names.append(f"{_batch_of(one)} {one['fixed_batch_size']}")
    return ", ".join(names)


def _with_speedup(summary: Frame) -> Frame:
    points = _known(_from_one_rank(summary), "speedup_mid", "no 1-rank run to measure speedup from")
    if (points["world_size"] == 1).all():
        raise NothingToDraw("only one rank was measured")
    return points


def _from_one_rank(summary: Frame) -> Frame:
    """Select what was measured, and for each series the shared run of one rank if it has no other.

    Raises:
        NothingToDraw: nothing was measured.
    """
    points = _known(summary, "step_s", "no finished throughput run")
    lacking = points[(points["one_rank"] != "") & (points["one_rank"] != points["series"])]
    lacking = lacking.drop_duplicates(["series", "fixed_batch_size"])
    ones = points[points["world_size"] == 1].drop(columns=["strategy", "label", "one_rank"])
    keys = ["one_rank", "fixed_batch_size"]
    wanted = lacking[["series", "label", "strategy", *keys]].rename(columns={"series": "of"})
    shared = wanted.merge(ones, left_on=keys, right_on=["series", keys[1]])
    shared = shared.assign(series=shared["of"]).drop(columns="of")
    return pd.concat([shared, points], ignore_index=True)


def _known(summary: Frame, column: str, lacking: str) -> Frame:
    found = summary[summary[column].notna()]
    if found.empty:
        raise NothingToDraw(lacking)
    return found


def _interval(points: Frame, value: str) -> dict[str, Any]:
    names = {"value": "mid", "low": "lo", "high": "hi"}
    return {name: points[f"{value}_{end}"] for name, end in names.items()}


def _place(point: Point, looks: Looks) -> tuple[int, int]:
    return point["world_size"], list(looks).index(point["series"])


def _best(points: Frame, column: str) -> Point:
    """Return the point of the highest value on the most ranks, of what trains the same model."""
    rivals = points[(points["strategy"] != CEILING) & (points["transform"] == "none")]
    rivals = points if rivals.empty else rivals
    last = rivals[rivals["world_size"] == rivals["world_size"].max()]
    last = last[last["leads"]] if last["leads"].any() else last  # no chance value of a single run
    return last.loc[last[column].idxmax()]


def _fastest(points: Frame) -> str:
    best = _best(points, "speedup_mid")
    at = f"at {_batch_of(best)} {best['fixed_batch_size']}"
    speedup = Interval(best["speedup_lo"], best["speedup_mid"], best["speedup_hi"])
    run = f"With {best['label']}, {_ranks(best)} are"
    if speedup.lo <= 1 <= speedup.hi:
        return f"{run} not significantly faster than one: {speedup:.2f} ×, {at}"
    if speedup.hi < 1:
        return f"{run} slower than one: {speedup:.2f} ×, {at}"
    return f"{_lead(points, best)}: {speedup.mid:.2f} × one rank, on {_ranks(best)} {at}"


def _lead(points: Frame, best: Point) -> str:
    """Name the series of the best point, and those that it was not shown to beat there."""
    place = ["scaling", "world_size", "fixed_batch_size", "transform"]
    here = points[(points[place] == best[place]).all(axis=1) & points["leads"]]
    others = [str(name) for name in here["label"] if name != best["label"]]
    unsure = not best["leads"] or best["num_repeats"] < ENOUGH_REPEATS
    rivals = points["series"][points["strategy"] != CEILING].nunique()
    if unsure or len(others) > 3 or rivals == 1:
        return f"Highest speedup with {best['label']}"
    if others:
        names = in_words([best["label"], *others])
        short = f"{best['label']} and {number_of(len(others), 'other')}"
        names = names if len(names) < MOST_LETTERS else short
        return f"{names} are fastest, with no significant difference"
    return f"{best['label']} is fastest"


def _ranks(point: Point) -> str:
    return number_of(point["world_size"], "rank")


def _panel_title(summary: Frame, points: Frame, series: str, width: int) -> list[str]:
    """Name the series, with its metric: what is fast must also have learnt."""
    lines_ = wrap(_label(points, series), width, 12)
    metric = str(summary["metric"].iloc[0])
    learns = metric in points and (points["data"] != "synthetic").any()
    known = points[metric][points["series"] == series].dropna() if learns else points[:0]
    if not len(known):
        return lines_
    title, factor = heading(metric)
    low, high = (short_text(factor * end) for end in (known.min(), known.max()))
    text = low if low == high else f"{low}–{high}"
    return [*lines_, f"{metric} {text}{title.removeprefix(metric)}"]


def _batch_of(point: Point) -> str:
    return batch_name(point["scaling"])


def batch_name(scaling: str) -> str:
    """Name the batch size that a scaling keeps."""
    return "global batch" if scaling == "strong" else "per-rank batch"


def _scaling(points: Frame) -> str:
    return f"{points['scaling'].iloc[0]} scaling"


def _label(points: Frame, series: str) -> str:
    """Name the series, with its difference from the others."""
    one = points[points["series"] == series].iloc[0]
    if one["strategy"] == CEILING:
        return f"{one['label']} (ceiling)"
    return one["label"] if one["transform"] == "none" else f"{one['label']} (another model)"


def _shared(points: Frame, column: str, otherwise: Any) -> Any:
    values = set(points[column])
    return values.pop() if len(values) == 1 else otherwise


def _unlike(points: Frame) -> Any:
    """Tell emulated points from others; if all are emulated, a note says so, and no mark."""
    emulated = points["emulation"] != "none"
    return emulated & (not emulated.all())


def _notes(points: Frame, look: str = "Hollow") -> list[str]:
    """Say how points were emulated, and which settings their labels leave out."""
    notes = list[str]()
    if how := emulation_text(points["emulation"]):
        which = look if _unlike(points).any() else "All"
        notes.append(f"{which}: emulated ({how}).")
    usual = points["usual"].iloc[0]
    return [*notes, f"Unless a name shows another setting: {usual}."] if usual else notes


def emulation_text(emulations: Iterable[str]) -> str:
    """Join the clauses of several runs, those that differ in numbers alone as one: `1, 2 hosts`."""
    clauses = {each for text in set(emulations) - {"none"} for each in text.split("; ")}
    alike: dict[str, list[list[str]]] = {}
    for clause in sorted(clauses):
        text = NUMBER.sub("{}", clause).replace("{} host ", "{} hosts ")
        alike.setdefault(text, []).append(NUMBER.findall(clause))
    merged = [
        text.format(*(", ".join(dict.fromkeys(place)) for place in zip(*numbers, strict=True)))
        for text, numbers in alike.items()
    ]
    return "; ".join(re.sub(r"^1 hosts ", "1 host ", each) for each in merged)
