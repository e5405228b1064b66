"""The kinds of charts that the lab draws: lines with intervals, bars, and dots with intervals.

Each function takes a table, and returns a chart of Altair with its data inside, and its width in
pixels. `lab.draw.chart.Chart` puts a title around one.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from lab.draw.chart import GREY, INK, LABEL_PX, LETTER, Look, alt, look_of_series, spread

Frame = Any  # a pandas.DataFrame: pandas' own types do not know what its columns hold

PANEL, MOST_COLUMNS, GAP = 240, 4, 18  # pixels of a panel, panels beside each other, between them
ALONE = 400  # pixels of a panel that has none beside it
NAMED_COLUMNS = 2  # panels with names beside each other
FADED = 0.12  # opacity of the series that a reader did not single out
MOST_NAMED = 9  # lines whose names fit beside a panel
LEAST, EDGE = 170, 50  # pixels of the narrowest panel, and of what is left of the first one
BAR = 18  # pixels of a bar with the gap to the next
BARS = 460  # pixels of the longest bar


@dataclass(frozen=True)
class Axis:
    """A horizontal or vertical axis of numbers.

    Attributes:
        log: the base of a logarithmic axis; 0: a linear one.
        ticks: where labels are; None: the library decides.
        label: a Vega expression of a tick's `datum.value`, for its text; "": the number itself.
        domain: the smallest and the largest value; None: as the data need, linear ones from 0.
    """

    title: str
    log: int = 0
    ticks: Sequence[float] | None = None
    label: str = ""
    domain: tuple[float, float] | None = None

    def scale(self, domain: tuple[float, float]) -> alt.Scale:
        """Return the scale between two values."""
        if self.log:
            return alt.Scale(type="log", base=self.log, domain=domain, nice=False)
        return alt.Scale(type="linear", domain=domain, nice=False)

    def axis(self, domain: tuple[float, float], grid: bool = True) -> alt.Axis:
        """Return the ticks and their labels."""
        ticks = self.ticks
        if ticks is None and self.log:
            ticks = round_values(*domain)
        rest: dict[str, Any] = {} if ticks is None else {"values": list(ticks)}
        plain = {} if ticks is None else {"format": "~g"}
        rest |= {"labelExpr": self.label} if self.label else plain
        return alt.Axis(grid=grid, **rest)


def lines(
    data: Frame,
    x: Axis,
    y: Axis,
    looks: Mapping[str, Look],
    labels: Mapping[str, str] | None = None,
    panels: Callable[[Any], str] | None = None,
    reference: str = "",
    upright: float | None = None,
    marks: bool = True,
    size: tuple[int, int] | None = None,
    width: int = 0,
) -> tuple[Any, int]:
    """Draw a line with intervals for each series, named where it ends, in a panel for each `panel`.

    Args:
        data: columns series, x, value, low, high (NaN: no interval), and optionally panel (drawn
            in ascending order), hollow (a point that was emulated or predicted), at (where a
            point is drawn, if beside its x), and measured (what was measured of a predicted
            point: a filled one, beside the line); all others are shown where the pointer rests.
        looks: of all series, in reading order. labels: other texts of them.
        panels: the title of a panel by its value.
        reference: a column whose values a dotted grey line joins, such as the ideal.
        upright: where a dotted grey line stands upright.
        marks: whether a line's points have marks.
        size: pixels of a panel; None: wider if there is one alone.
        width: pixels of the whole, which panels are fitted into instead; 0: as they need.
    """
    labels = labels or {name: name for name in looks}
    shown = [_tip(data, name, {"x": x.title, "value": y.title}) for name in _told(data, reference)]
    shown.append(alt.Tooltip("interval:N"))
    data = data.reset_index(drop=True)
    data = data.assign(series=data["series"].map(labels.get), interval=_intervals(data))
    for name, value in {"panel": 0, "hollow": False, "at": data["x"]}.items():
        data[name] = data.get(name, value)
    order = sorted(set(data["panel"]))
    size = size or (PANEL if len(order) > 1 else ALONE, PANEL)
    beside = 12 + LETTER * LABEL_PX * max(map(len, labels.values()))
    named = data.groupby("panel")["series"].nunique().max() <= MOST_NAMED
    named = bool(named) and (not width or beside < 0.4 * width)
    beside = beside if named else GAP
    columns = min(len(order), NAMED_COLUMNS if named else MOST_COLUMNS)
    if width:
        columns, size = fitted(len(order), beside, width, size[1])
    x_domain, y_domain = x.domain or _reach(data[["x", "at"]], x), y.domain or _values(data, y)
    look = look_of_series(looks, labels)
    if not named:
        fitting = legend_columns(labels.values(), width or 4 * PANEL)
        legend = alt.Legend(columns=fitting, symbolType="stroke", symbolStrokeWidth=2)
        look = {channel: one.legend(legend) for channel, one in look.items()}
    # A click on a name, or on an entry of the legend, singles its series out on a page.
    bound: Any = {} if named else {"bind": "legend"}
    picked = alt.selection_point(name="picked", fields=["series"], **bound)
    look["opacity"] = alt.condition(picked, alt.value(1.0), alt.value(FADED))
    x_scale, y_scale = x.scale(x_domain), y.scale(y_domain)
    if not x.log:
        x_scale.padding = 6
    across = alt.X("at:Q", title=x.title, scale=x_scale, axis=x.axis(x_domain, grid=False))
    up = alt.Y("value:Q", title=y.title, scale=y_scale, axis=y.axis(y_domain))
    layers = _line_layers((across, up), (x_scale, y_scale), look, reference, upright)
    if marks:
        layers.append(_points(across, up, look, shown))
    if "measured" in data:
        layers.append(_measured(across, y_scale, look, shown))
    if named:
        data = pd.concat([data, _ends(data, y_domain, bool(y.log), size[1])])
        layers.insert(0, _names(look, x_scale, y_scale))
    layers[0] = layers[0].add_params(picked)  # Altair looks for it in the first layer of panels
    panel = alt.layer(*layers).properties(width=size[0], height=size[1])
    width = width or int(columns * (size[0] + beside) + EDGE)
    return _in_panels(panel, data, panels, columns), width


def _line_layers(
    at: tuple[alt.X, alt.Y],
    scales: tuple[alt.Scale, alt.Scale],
    look: Mapping[str, Any],
    reference: str,
    upright: float | None,
) -> list[Any]:
    """Return the lines, those to compare them with, and the intervals of their points."""
    (x_scale, y_scale), base = scales, alt.Chart()
    layers: list[Any] = [base.mark_line(strokeWidth=1.8).encode(*at, **look)]
    if reference:
        dotted = base.mark_line(color=GREY, strokeDash=[2, 3], strokeWidth=1.2, clip=True)
        layers.append(dotted.encode(alt.X("x:Q", scale=x_scale), y=f"{reference}:Q"))
    if upright is not None:
        standing = base.mark_rule(color=GREY, strokeDash=[2, 3], strokeWidth=1.2)
        once = standing.transform_aggregate(n="count()")
        layers.append(once.encode(alt.XDatum(upright, scale=x_scale)))
    whole = base.mark_rule(strokeWidth=1.4).transform_filter("isValid(datum.low)")
    ends = alt.Y("low:Q", scale=y_scale), alt.Y2("high:Q")
    return [*layers, whole.encode(at[0], *ends, **_shade(look))]


def bars(
    data: Frame,
    title: str,
    colours: Mapping[str, str],
    marks: str = "",
    width: int = BARS,
    panels: Callable[[Any], str] | None = None,
    columns: int = 1,
) -> tuple[Any, int]:
    """Draw horizontal bars, stacked of their parts, with a text at their ends.

    Args:
        data: columns name, value and part (a key of `colours`), in reading order, and optionally
            low and high (an interval around a bar's end), text (written behind it), hollow
            (emulated), mark (a value with a tick across the bar), and panel (of several, in
            ascending order).
        title: of the axis.
        colours: by part, in the order in which they are stacked.
        marks: what a mark is, for the legend. width: pixels of the longest bar.
        panels: the title of a panel by its value. columns: panels beside each other.
    """
    names, parts = list(dict.fromkeys(data["name"])), list(colours)
    shown = list(data.columns)
    data = data.assign(order=data["part"].map(parts.index))
    bar_of = ["name", "panel"] if panels else ["name"]
    data["end"] = data.groupby(bar_of)["value"].transform("sum")
    data["behind"] = data[["end", *(["high"] if "high" in data else [])]].max(axis=1)
    high = float(data[["behind", *(["mark"] if "mark" in data else [])]].max().max())
    room = 0.02 + LETTER * LABEL_PX * _longest(data.get("text")) / width
    if "mark" in data:  # a text gives way to a mark that it would hide
        hides = data["mark"].between(data["behind"], data["behind"] + high * room * (1 + room))
        data["behind"] = data["mark"].where(hides, data["behind"])
    scale = alt.Scale(domain=[min(0.0, float(data["value"].min())), high * (1 + room)], nice=False)
    down = alt.Y("name:N", title=None, sort=names, axis=alt.Axis(labelLimit=420, ticks=False))
    colour = alt.Color(
        "part:N",
        scale=alt.Scale(domain=parts, range=list(colours.values())),
        legend=alt.Legend(columns=legend_columns(parts, width)) if len(parts) > 1 else None,
    )
    base = alt.Chart().encode(down)
    few = alt.Axis(tickCount=max(4, min(12, width // 60)))
    across = alt.X("value:Q", title=title, scale=scale, stack="zero", axis=few)
    hollow = alt.condition("datum.hollow", alt.value(0.35), alt.value(1.0))
    bar = base.mark_bar(height=BAR - 6).encode(
        across, color=colour, order="order:Q", tooltip=shown, opacity=hollow
    )
    layers: list[Any] = [bar]
    if "low" in data:
        rule = base.mark_rule(color=INK, strokeWidth=1.4).transform_filter("isValid(datum.low)")
        layers.append(rule.encode(alt.X("low:Q", scale=scale), alt.X2("high:Q")))
    if "mark" in data:
        legend = alt.Legend(symbolType="stroke", symbolStrokeWidth=2.5)
        what = alt.Stroke("what:N", scale=alt.Scale(domain=[marks], range=[INK]), legend=legend)
        tick = base.mark_tick(thickness=2.5, height=BAR, color=INK, opacity=1)
        tick = tick.transform_filter("isValid(datum.mark)")
        tick = tick.transform_calculate(what=json.dumps(marks))
        layers.append(tick.encode(alt.X("mark:Q", scale=scale), stroke=what))
    if "text" in data:
        text = base.mark_text(align="left", dx=6, fontSize=LABEL_PX, color=INK)
        layers.append(text.encode(alt.X("behind:Q", scale=scale), alt.Text("text:N")))
    chart = alt.layer(*layers).properties(width=width, height=BAR * len(names))
    beside = int(columns * (width + GAP) + LETTER * LABEL_PX * max(map(len, names)) + 40 - GAP)
    return _in_panels(chart, data, panels, columns), beside


def dots(
    data: Frame, looks: Mapping[str, Look], references: Mapping[str, float] | None = None
) -> tuple[Any, int]:
    """Draw a dot with its interval for each name, in a panel beside the others for each quantity.

    Args:
        data: columns name, panel (the title of its axis), value, low, high, and optionally hollow.
        looks: by name, in reading order.
        references: by panel a value at which a vertical line stands, such as 1 of ratios.
    """
    names, panels = list(looks), list(dict.fromkeys(data["panel"]))
    data = data.assign(hollow=data.get("hollow", False))
    scale = alt.Scale(domain=names, range=[look.colour for look in looks.values()])
    colour: Any = alt.Color("name:N", scale=scale, legend=None)
    wide = max(150, min(BARS, 620 // len(panels)))
    drawn: list[Any] = []
    for panel in panels:
        one = data[data["panel"] == panel]
        at = (references or {}).get(panel)
        ends = one[["value", "low", "high"]].assign(at=at if at is not None else one["value"])
        low, high = float(ends.min().min()), float(ends.max().max())
        margin = 0.06 * (high - low or abs(high) or 1.0)
        across = alt.Scale(domain=[low - margin, high + margin], nice=False)
        axis = alt.Axis(labels=not drawn, ticks=False, labelLimit=420)
        down = alt.Y("name:N", title=None, sort=names, axis=axis)
        base = alt.Chart(one).encode(down)
        x = alt.X("value:Q", title=panel, scale=across, axis=alt.Axis(tickCount=5))
        fill = alt.condition("datum.hollow", alt.value("white"), colour)
        point = base.mark_point(size=60, strokeWidth=1.8, opacity=1)
        tooltip = ["name:N", "value:Q", "low:Q", "high:Q"]
        rule = base.mark_rule(strokeWidth=1.6).transform_filter("isValid(datum.low)")
        layers: list[Any] = [
            rule.encode(alt.X("low:Q", scale=across), alt.X2("high:Q"), color=colour),
            point.encode(x, stroke=colour, fill=fill, tooltip=tooltip),
        ]
        if at is not None:
            line = alt.Chart(pd.DataFrame({"at": [at]})).mark_rule(color=GREY)
            layers.insert(0, line.encode(alt.X("at:Q", scale=across)))
        drawn.append(alt.layer(*layers).properties(width=wide, height=(BAR + 4) * len(names)))
    room = LETTER * LABEL_PX * max(map(len, names)) + 40
    return alt.hconcat(*drawn, spacing=GAP), int(len(panels) * (wide + GAP) + room)


def joined(charts: Sequence[Any], columns: int, spacing: int = GAP) -> Any:
    """Put charts beside and below each other; a series singled out in one is so in all."""
    with warnings.catch_warnings():
        # Altair says so when it takes their selections as one, which is intended.
        warnings.filterwarnings("ignore", message="Automatically deduplicated selection")
        return alt.concat(*charts, columns=columns, spacing=spacing)


def fitted(count: int, beside: float, width: int, height: int) -> tuple[int, tuple[int, int]]:
    """Fit panels into a width.

    Args:
        beside: pixels between panels, and right of the last.

    Returns:
        How many stand beside each other, and the pixels of each.
    """
    room = width - EDGE
    most = max(1, min(count, int(room / (LEAST + beside))))
    columns = math.ceil(count / math.ceil(count / most))
    return columns, (int(room / columns - beside), height)


def round_values(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 times powers of ten between two values."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [v for d in decades for v in (10.0**d, 2 * 10.0**d, 5 * 10.0**d) if low <= v <= high]


def legend_columns(labels: Any, width: int = 4 * PANEL) -> int:
    """Return how many of a legend's entries fit beside each other."""
    longest = max(map(len, labels), default=0)
    return max(1, min(4, int(width / (LETTER * LABEL_PX * longest + 40))))


def _reach(data: Frame, axis: Axis) -> tuple[float, float]:
    low, high = float(data.min().min()), float(data.max().max())
    return (low / 1.1, high * 1.1) if axis.log else (low, high)


def _values(data: Frame, axis: Axis) -> tuple[float, float]:
    ends = data[[name for name in ("value", "low", "high", "measured") if name in data]]
    high = float(ends.max().max())
    return (float(ends.min().min()) / 1.3, 1.3 * high) if axis.log else (0.0, 1.05 * high)


def _told(data: Frame, *others: str) -> list[str]:
    """List the columns that are shown where the pointer rests."""
    return [name for name in data if name not in ("panel", "hollow", "at", "low", "high", *others)]


def _tip(data: Frame, name: str, titles: Mapping[str, str]) -> alt.Tooltip:
    if data[name].dtype.kind == "f":
        return alt.Tooltip(f"{name}:Q", title=titles.get(name, name), format=".4~g")
    return alt.Tooltip(f"{name}:N", title=titles.get(name, name))


def _intervals(data: Frame) -> list[str]:
    ends = zip(data["low"], data["high"], strict=True)
    return ["" if math.isnan(low) else f"{low:.4g} to {high:.4g}" for low, high in ends]


def _longest(texts: Any) -> int:
    return 0 if texts is None else max(len(text) for text in texts if isinstance(text, str))


def _shade(look: Mapping[str, Any]) -> dict[str, Any]:
    return {name: look[name] for name in ("color", "opacity")}


def _points(across: alt.X, up: alt.Y, look: Mapping[str, Any], shown: list[alt.Tooltip]) -> Any:
    """Mark each point; a hollow one was emulated or predicted."""
    fill = alt.condition("datum.hollow", alt.value("white"), look["color"])
    marked: dict[str, Any] = {"stroke": look["color"], "fill": fill, "opacity": look["opacity"]}
    point = alt.Chart().mark_point(size=46, strokeWidth=1.6)
    return point.encode(across, up, tooltip=shown, **marked)


def _measured(
    across: alt.X, scale: alt.Scale, look: Mapping[str, Any], shown: list[alt.Tooltip]
) -> Any:
    """Mark, beside a predicted line, what was measured."""
    known = alt.Chart().mark_point(size=46, filled=True)
    known = known.transform_filter("isValid(datum.measured)")
    return known.encode(across, alt.Y("measured:Q", scale=scale), tooltip=shown, **_shade(look))


def _names(look: Mapping[str, Any], x: alt.Scale, y: alt.Scale) -> Any:
    """Write each line's name at its end."""
    text = alt.Chart().mark_text(align="left", dx=9, fontSize=LABEL_PX, clip=False)
    shown = text.transform_filter("isValid(datum.name)")
    end = alt.Y("end:Q", scale=y)
    return shown.encode(alt.X("at:Q", scale=x), end, alt.Text("name:N"), **_shade(look))


def _in_panels(chart: Any, data: Frame, panels: Callable[[Any], str] | None, columns: int) -> Any:
    """Give a chart its data: one for each value of `panel`, in ascending order; None: it alone."""
    if panels is None:
        return chart.properties(data=data)
    texts = {value: panels(value) for value in sorted(set(data["panel"]))}
    data["panel"] = data["panel"].map(texts.get)
    return in_rows(chart.properties(data=data), "panel", list(texts.values()), columns)


def in_rows(chart: Any, field: str, values: list[str], columns: int, **look: Any) -> Any:
    """Draw `chart` once for each value of a field, in rows of so many columns.

    A last row that is not full has axes of its own: shared ones would stand below empty places.
    """
    facet = alt.Facet(f"{field}:N", title=None, sort=values, **look)
    panels = chart.facet(facet=facet, columns=columns, spacing=GAP)
    is_ragged = len(values) > columns and len(values) % columns
    return panels.resolve_axis(x="independent") if is_ragged else panels


def _ends(data: Frame, domain: tuple[float, float], log: bool, height: int) -> Frame:
    """Return a row for the end of each line, where its name is written: at, end and name."""
    low, high = domain
    last = data.loc[data.groupby(["panel", "series"])["x"].idxmax()]
    gap = (LABEL_PX + 3) / height
    rows: list[Frame] = []
    for _, panel in last.groupby("panel"):
        values = [float(value) for value in panel["value"]]
        if log:
            reach = math.log(high / low)
            places = spread([math.log(v / low) for v in values], gap * reach, reach, 0.0)
            ends = [low * math.exp(place) for place in places]
        else:
            ends = spread(values, gap * (high - low), high, low)
        names = panel["series"]
        rows.append(panel[["series", "panel"]].assign(at=data["at"].max(), end=ends, name=names))
    return pd.concat(rows)
