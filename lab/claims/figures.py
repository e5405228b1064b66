"""Chart findings as the figures of a paper."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np
import pandas as pd

from lab.claims.claims import Bounds
from lab.claims.device import GPUS, PaperNetwork
from lab.claims.findings import EVIDENCE, KINDS, ClaimVerdict, Reproduced, tally
from lab.claims.predicted import rate_speedups
from lab.draw.chart import (
    BLUE,
    GREEN,
    GREY,
    INK,
    LABEL_PX,
    LETTER,
    ORANGE,
    SKY,
    VERMILLION,
    Chart,
    Look,
    alt,
    looks_of,
)
from lab.draw.plots import BAR, GAP, PANEL, Axis, in_rows, legend_columns, lines, round_values
from lab.simulate.hardware import slowest
from lab.simulate.score import ScoredCell

COLUMNS = 3
COLOURS = dict(zip(KINDS, (ORANGE, VERMILLION, SKY, BLUE, GREY, GREEN), strict=True))
LIMITS = (0.2, 5.0)  # of the axis of claims, in units of what a claim says
LONGEST = 72  # letters of a claim
MOST = 8  # powers of two: the end of the colours of a map
MACHINES = (  # machine, column, colour, what the legend says
    ("desktop", 0, ORANGE, "published: desktop, 1 thread"),
    ("desktop", 1, SKY, "published: desktop, 2 threads"),
    ("gpu", GPUS.index("GTX 1080"), BLUE, "published: GTX 1080"),
)
CURES = (GREEN, SKY, ORANGE, VERMILLION, BLUE)  # colours of a finding's lines
HERE = {1: ("circle", "here, 1 thread"), 2: ("square", "here, 2 threads")}


def finding(cells: Sequence[ScoredCell], reproduced: Reproduced, title: str) -> Chart | None:
    """Chart the finding in one panel: measured speedup of the most workers over the batch size.

    A line for each of the reproduction's cures with the range of its repeats, a diamond where the
    paper publishes a figure. None if no such cell was measured.
    """
    cures, most = reproduced.grid.cures, max(reproduced.grid.world_sizes)
    data: Any = pd.DataFrame(
        {
            "series": cure["name"],
            "x": batch,
            **dict(zip(("low", "value", "high"), ends, strict=True)),
        }
        for cure in cures
        for batch, ends in _speedups(cells, cure, most)
    )
    if data.empty:
        return None
    best = data.groupby("series", sort=False)["value"].max()
    is_slower = data[data["series"] == best.index[0]].sort_values("x")["value"].iloc[0] < 1
    styles = zip(cures, CURES, strict=False)
    looks = {cure["name"]: Look(colour, "-", "o") for cure, colour in styles}
    authors = title.partition(",")[0]
    published: Any = pd.DataFrame(
        [
            (cell.at.batch_size, value, looks[cure["name"]].colour, f"{authors}: {value:g}")
            for cell in reproduced.cells
            for value in cell.published
            for cure in cures
            if cell.at.strategy == cure.get("published", cure["strategy"])
            and (cell.at.world_size, cure.get("profile")) == (most, None)
        ],
        columns=["x", "value", "colour", "series"],
    )
    of_published = zip(published["series"], published["colour"], strict=True)
    looks |= {name: Look(colour, "-", "D") for name, colour in of_published}
    data = pd.concat([data, published]).assign(one=1.0)
    batches = sorted(set(data["x"]))
    x = Axis("images per step, of all workers together", log=2, ticks=batches)
    y = Axis(f"speedup of {most} workers over one", ticks=range(most + 1), domain=(0, most))
    body, width = lines(data, x, y, looks, reference="one", size=(560, 330))
    mark = alt.Chart(published).mark_point(shape="diamond", filled=True, size=140, opacity=1)
    mark = mark.encode(alt.X("x:Q"), alt.Y("value:Q"), alt.Color("colour:N", scale=None))
    cured = data[data["x"] == batches[-1]].set_index("series")["value"].reindex(best.index[1:])
    message = (
        f"With a {best.index[0]}, {most} workers are at most {best.iloc[0]:.1f} times as fast as "
        f"one{', and slower at small batches' if is_slower else ''}; "
        f"remedies reach {cured.min():.1f} to {cured.max():.1f} times at {batches[-1]} images"
    )
    about = [
        f"{title}. Measured {reproduced.grid.setup}.",
        f"Vertical lines: all repeats. Diamonds: published by {authors} "
        "Dotted: as fast as one worker.",
    ]
    return Chart("finding", message, about, alt.layer(body, mark), width)


def _speedups(
    cells: Sequence[ScoredCell], cure: Mapping[str, str], most: int
) -> Iterator[tuple[int, tuple[float, float, float]]]:
    """Yield for each batch size the least, the median and the largest speedup of the repeats."""
    own = [cell for cell in cells if cell.strategy == cure["strategy"]]
    own = [cell for cell in own if cell.profile == cure.get("profile", cells[0].profile)]
    alone = {cell.batch_size: median(cell.measured_s) for cell in own if cell.world_size == 1}
    for cell in own:
        if cell.world_size == most and cell.batch_size in alone:
            values = sorted(alone[cell.batch_size] / each for each in cell.measured_s)
            yield cell.batch_size, (values[0], median(values), values[-1])


def speedup_bars(reproduced: Reproduced, about: Sequence[str]) -> Chart:
    """Chart the speedup of cells: a panel for each strategy, a group of bars for each batch size.

    Bars are measured with the range of their repeats; if nothing was, they are predicted. A dash
    over a bar is its prediction, a diamond the paper's own figure.
    """
    grid = reproduced.grid
    is_measured = any(not math.isnan(cell.measured) for cell in reproduced.cells)
    data: Any = pd.DataFrame(
        {
            **{"strategy": _title(cell.at.strategy), "batch": cell.at.batch_size},
            **{"ranks": cell.at.world_size, "predicted": cell.predicted},
            "value": cell.measured if is_measured else cell.predicted,
            "low": min(cell.repeats, default=math.nan),
            "high": max(cell.repeats, default=math.nan),
        }
        for cell in reproduced.cells
    )
    published = pd.DataFrame(
        [
            (_title(cell.at.strategy), cell.at.batch_size, cell.at.world_size, value)
            for cell in reproduced.cells
            for value in cell.published
        ],
        columns=["strategy", "batch", "ranks", "published"],
    )
    data = pd.concat([data, published])
    across = alt.X("batch:O", title="global batch", axis=alt.Axis(labelAngle=0))
    base = alt.Chart().encode(across, alt.XOffset("ranks:O"))
    scale = alt.Scale(scheme=alt.SchemeParams("blues", extent=[0.35, 1.0]))
    legend = alt.Legend(title="ranks", columns=len(grid.world_sizes))
    colour = alt.Color("ranks:O", scale=scale, legend=legend)
    bar = base.mark_bar(opacity=1.0 if is_measured else 0.55)
    layers: list[Any] = [
        bar.encode(alt.Y("value:Q", title="speedup over 1 rank"), colour, tooltip=[*data.columns]),
        alt.Chart().mark_rule(color=INK).encode(y=alt.datum(1)),
    ]
    if is_measured:
        rule = base.mark_rule(color=ORANGE, strokeWidth=2).transform_filter("isValid(datum.low)")
        layers.append(rule.encode(alt.Y("low:Q"), alt.Y2("high:Q")))
        layers.append(base.mark_tick(color=INK, thickness=2, opacity=1).encode(y="predicted:Q"))
    diamond = base.mark_point(shape="diamond", color=VERMILLION, filled=True, size=50, opacity=1)
    diamond = diamond.transform_filter("isValid(datum.published)")
    layers.append(diamond.encode(y="published:Q"))
    panel = alt.layer(*layers).properties(width=PANEL, height=150, data=data)
    marks = "black: predicted; orange: all repeats; " if is_measured else "bars: predicted; "
    about = [f"one panel for each strategy; {marks}diamond: published", *about]
    what = "measured" if is_measured else "predicted"
    message = _best_speedup(data[data["strategy"] != _title("none")], what)
    return _in_panels("speedup", message, about, panel, [_title(each) for each in grid.strategies])


def _title(strategy: str) -> str:
    return "none (ceiling)" if strategy == "none" else strategy


def _best_speedup(data: Any, what: str) -> str:
    last = data[(data["ranks"] == data["ranks"].max()) & data["value"].notna()]
    if last.empty:
        return f"Speedup, {what}"
    best, least = (last.loc[last["value"].agg(which)] for which in ("idxmax", "idxmin"))
    return (
        f"Speedup {what} on {best['ranks']} ranks: {least['value']:.2f} ({least['strategy']}, "
        f"batch {least['batch']}) to {best['value']:.2f} ({best['strategy']}, batch "
        f"{best['batch']})"
    )


def _in_panels(
    name: str, message: str, about: Sequence[str], panel: Any, titles: Sequence[str]
) -> Chart:
    columns = min(len(titles), COLUMNS)
    body = in_rows(panel, "strategy", [*titles], columns)
    return Chart(name, message, about, body, columns * (PANEL + GAP))


def regime_map(speedups: Any, about: Sequence[str]) -> Chart:
    """Chart predicted speedup over ranks and batch, a panel for each strategy.

    In red areas, below the line of speedup 1, training is slower than on one rank.

    Args:
        speedups: see lab.claims.predicted.speedup_map.
    """
    half = math.sqrt(2)  # places are a factor of two apart
    speedups = speedups.assign(log2=np.log2(speedups["speedup"]))
    data: Any = speedups.dropna()
    ranks, batch = data["ranks"], data["batch"]
    data = data.assign(left=ranks / half, right=ranks * half, bottom=batch / half, top=batch * half)
    lines_of: Any = pd.DataFrame(_breaking_even(speedups), columns=["strategy", "ranks", "even"])
    data = pd.concat([data, lines_of])
    x = alt.X("left:Q", title="ranks", **_powers(data["left"].min(), data["right"].max()))
    y = alt.Y("bottom:Q", title="global batch", **_powers(data["bottom"].min(), data["top"].max()))
    scale = alt.Scale(scheme="redblue", domain=[-MOST, MOST], clamp=True)
    words = "datum.value < 0 ? '1/' + pow(2, -datum.value) : '' + pow(2, datum.value)"
    legend = alt.Legend(
        title="speedup over 1 rank", labelExpr=words, values=list(range(-MOST, MOST + 1, 2)),
        gradientLength=PANEL,
    )  # fmt: skip
    filled = alt.Chart().mark_rect(clip=True).transform_filter("isValid(datum.speedup)")
    even = alt.Chart().mark_line(color=INK, strokeWidth=1.4, clip=True)
    panel = alt.layer(
        filled.encode(
            *(x, alt.X2("right:Q"), y, alt.Y2("top:Q")),
            alt.Color("log2:Q", scale=scale, legend=legend),
            tooltip=["ranks", "batch", "speedup"],
        ),
        even.transform_filter("isValid(datum.even)").encode(x="ranks:Q", y="even:Q"),
    ).properties(width=PANEL, height=PANEL * 3 / 4, data=data)
    most = int(data["ranks"].max())
    pays = data[(data["ranks"] == most) & (data["speedup"] > 1)]
    smallest = pays[pays["strategy"] != "none"].groupby("strategy")["batch"].min()
    message = f"Predicted: {most} ranks are slower than one at every batch"
    if not smallest.empty:
        first = ", ".join(smallest.index[smallest == smallest.min()])
        message = (
            f"Predicted: {most} ranks are faster than one from global batch "
            f"{smallest.min():.0f} on, first with {first}"
        )
    about = ["the line: as fast as one rank; red: slower", *about]
    return _in_panels("regimes", message, about, panel, [*speedups["strategy"].unique()])


def _powers(low: float, high: float) -> dict[str, Any]:
    """Return the scale and the axis of powers of two."""
    ticks = [2**power for power in range(0, 20, 2) if low <= 2**power <= high]
    return {
        "scale": alt.Scale(type="log", base=2, domain=[low, high], nice=False),
        "axis": alt.Axis(values=ticks, format="d", grid=False),
    }


def _breaking_even(speedups: Any) -> Iterator[tuple[str, int, float]]:
    """Yield by strategy and ranks the batch of speedup 1, between two batches, by logarithms."""
    for (strategy, ranks), column in speedups.groupby(["strategy", "ranks"], sort=False):
        places = zip(column["batch"], column["log2"], strict=True)
        for (smaller, low), (larger, high) in itertools.pairwise(places):
            if low < 0 <= high:
                yield strategy, ranks, smaller * (larger / smaller) ** (low / (low - high))


def speedup_over_rate(reproduced: Reproduced, about: Sequence[str]) -> Chart:
    """Chart predicted speedup over the rate of the links, a panel for each batch.

    The rate of the own links of the paper's hardware is marked.
    """
    ranks, machine = max(reproduced.grid.world_sizes), reproduced.paper.hardware
    own = 8e-9 * slowest(machine).bandwidth_bytes_per_s
    found = rate_speedups(reproduced.grid, reproduced.paper).dropna()
    data: Any = pd.DataFrame(
        {
            **{"series": found["strategy"], "panel": found["batch"], "x": 8e-9 * found["rate"]},
            **{"value": found["speedup"], "low": math.nan, "high": math.nan, "one": 1.0},
        }
    )
    body, width = lines(
        *(data, Axis("link, Gb/s", log=10, ticks=(0.1, 1, 10, 100, 1000))),
        Axis("speedup over 1 rank"),
        looks_of(data["series"]),
        panels=lambda batch: f"global batch {batch}",
        reference="one",
        upright=own,
        marks=False,
    )
    near = data.assign(far=(data["x"] / own).map(lambda ratio: abs(math.log(ratio))))
    near = near[(near["far"] == near["far"].min()) & (near["series"] != "none")]
    message = f"Predicted speedup of {ranks} ranks by the rate of their links"
    if not near.empty:
        best = near.loc[near["value"].idxmax()]
        message = (
            f"Predicted: over the machine's links of {own:.3g} Gb/s, {best['series']} is fastest, "
            f"with a speedup of {best['value']:.2f} on {ranks} ranks"
        )
    about = ["dotted lines: as fast as one rank; the rate of the machine's links", *about]
    return Chart("bandwidth", message, about, body, width)


def verdicts(found: Sequence[ClaimVerdict], about: Sequence[str]) -> Chart | None:
    """Chart a line for each claim: the band that it allows, and the values that were found.

    Values are divided by the claim's figure or bound, so that all share an axis; those beyond the
    axis are drawn at its end. None if no value is known.
    """
    ordered = [each for kind in KINDS for each in found if each.kind == kind]
    known = [each for each in ordered if each.outcome != "unknown"]
    if not known:
        return None
    data = pd.DataFrame([_line(each) for each in known])
    names = list(data["name"])
    scale = alt.Scale(type="log", domain=LIMITS, nice=False)
    axis = alt.Axis(values=[0.2, 0.5, 1, 2, 5], format="~g")
    # A mark at the axis' end does not touch the name.
    left = alt.Axis(labelLimit=560, labelPadding=8, ticks=False)
    down = alt.Y("name:N", sort=names, title=None, axis=left)
    base = alt.Chart(data).encode(down)
    kinds = [kind for kind in KINDS if kind in set(data["kind"])]
    colours = alt.Scale(domain=kinds, range=[COLOURS[kind] for kind in kinds])

    def at(column: str) -> alt.X:
        return alt.X(f"{column}:Q", scale=scale, title="value / what the claim says", axis=axis)

    def between(low: str, high: str, colour: str) -> Any:
        rule = base.mark_rule(color=colour, strokeWidth=1.4)
        return rule.transform_filter(f"isValid(datum.{low})").encode(at(low), alt.X2(f"{high}:Q"))

    allowed = base.mark_bar(height=BAR - 5, opacity=0.3)
    diamond = base.mark_point(shape="diamond", color=INK, size=34, opacity=1, strokeWidth=1.2)
    hollow = alt.condition("datum.decides", alt.value(INK), alt.value("white"))
    point = base.mark_point(color=INK, filled=True, size=34, opacity=1)
    one = alt.Chart().mark_rule(color=INK, strokeWidth=0.6).encode(x=alt.datum(1, scale=scale))
    found_columns = [str(column) for column in data.columns]
    body = alt.layer(
        allowed.encode(
            at("least"), alt.X2("most:Q"),
            alt.Color("kind:N", scale=colours, legend=alt.Legend(columns=len(kinds))),
        ),
        one,
        between("predicted_lo", "predicted_hi", GREY),
        between("lo", "hi", INK),
        diamond.transform_filter("isValid(datum.predicted)").encode(at("predicted"), fill=hollow),
        point.transform_filter("isValid(datum.mid)").encode(at("mid"), tooltip=found_columns),
    ).properties(width=440, height=BAR * len(known))  # fmt: skip
    parts = [
        f"{basis}: {counts['holds']} of {sum(counts.values()) - counts['unknown']} agree"
        for basis, counts in tally(found).items()
        if basis != "elsewhere" and sum(counts.values()) > counts["unknown"]
    ]
    message = "; ".join(parts).capitalize() or "No claim that is evidence can be tested here"
    marks = (
        "band: allowed by the claim; diamond: predicted or counted; grey: range of the prediction"
    )
    if any(not math.isnan(each.measured.mid) for each in known):
        marks += "; dot: measured; black: its 95 % interval"
    evidence = f"only claims of the kinds {', '.join(EVIDENCE)} are evidence"
    beside = LETTER * LABEL_PX * max(map(len, names), default=0)
    return Chart("claims", message, [marks, evidence, *about], body, int(440 + beside))


def _line(verdict: ClaimVerdict) -> dict[str, Any]:
    unit, says = _unit(verdict.claim.check), verdict.claim.says
    text = says if len(says) <= LONGEST else f"{says[: LONGEST - 1]}…"
    least, most = verdict.claim.check.allowed
    low, high = verdict.predicted_ends or (verdict.predicted, verdict.predicted)
    value = verdict.measured
    found = {"least": least, "most": most, "predicted": verdict.predicted}
    found |= {"predicted_lo": low, "predicted_hi": high}
    found |= {"lo": value.lo, "mid": value.mid, "hi": value.hi}
    return {
        **{"name": f"{text}: {verdict.words}", "kind": verdict.kind},
        "decides": verdict.basis in ("counted", "predicted"),
        **{key: _clip(value, unit) for key, value in found.items()},
    }


def _unit(check: Bounds) -> float:
    """Return what the claim says: its figure, or its one bound; 1 where that is 0."""
    return next(x for x in (check.about, check.at_least, check.at_most) if x is not None) or 1.0


def _clip(value: float | None, unit: float) -> float:
    if value is None or math.isnan(value):
        return math.nan
    return min(max(value / unit, LIMITS[0]), LIMITS[1])


def mini_batches(found: Sequence[PaperNetwork], about: Sequence[str]) -> Chart:
    """Chart a row for each network: a mark for each tool, and those of this machine."""
    rows = [(f"{one.name}, batch {one.batch_size}", one) for one in found]
    published = pd.DataFrame(
        {"name": name, "tool": tool, "seconds": seconds, "machine": text}
        for name, one in rows
        for machine, place, _, text in MACHINES
        for tool, seconds in one.published(machine, place).items()
    )
    here = pd.DataFrame(
        [
            {"name": name, "seconds": value.mid, "low": value.lo, "high": value.hi, "here": text}
            for name, one in rows
            for threads, (_, text) in HERE.items()
            if (value := one.here.get(threads))
        ],
        columns=["name", "seconds", "low", "high", "here"],
    )
    ends: Any = pd.concat([published["seconds"], here["low"], here["high"], here["seconds"]])
    low, high = float(ends.min()) / 1.3, float(ends.max()) * 1.3
    scale = alt.Scale(type="log", domain=[low, high], nice=False)
    title = "seconds per mini-batch"
    axis = alt.Axis(values=round_values(low, high), format="~g")
    x = alt.X("seconds:Q", title=title, scale=scale, axis=axis)
    names = [name for name, _ in rows]
    down = alt.Y("name:N", sort=names, title=None, axis=alt.Axis(ticks=False, labelLimit=420))
    colours = alt.Scale(
        domain=[text for *_, text in MACHINES], range=[colour for *_, colour, _ in MACHINES]
    )
    shapes = alt.Scale(
        domain=[text for _, text in HERE.values()], range=[shape for shape, _ in HERE.values()]
    )
    columns = legend_columns([text for *_, text in MACHINES], 460)
    tick = alt.Chart(published).mark_tick(thickness=2.5, height=BAR, opacity=1)
    base = alt.Chart(here).encode(down)
    body = alt.layer(
        tick.encode(
            x, down, alt.Color("machine:N", scale=colours, legend=alt.Legend(columns=columns)),
            tooltip=["tool", "seconds", "machine"],
        ),
        base.mark_rule(color=INK).encode(alt.X("low:Q", scale=scale), alt.X2("high:Q")),
        base.mark_point(color=INK, filled=True, size=50, opacity=1).encode(
            x, alt.Shape("here:N", scale=shapes, legend=alt.Legend(columns=columns))
        ),
    ).properties(width=460, height=(BAR + 8) * len(names))  # fmt: skip
    message = "Seconds per mini-batch, as published"
    known = [
        (one.here[1].mid, one.published("desktop", 0).values()) for one in found if 1 in one.here
    ]
    if known:
        inside = sum(min(others) <= mid <= max(others) for mid, others in known if others)
        message = (
            f"On one thread here, the times of {inside} of {len(known)} networks are within the "
            "range published for a desktop CPU"
        )
    return Chart("mini_batches", message, ["published: a mark for each tool", *about], body, 460)
