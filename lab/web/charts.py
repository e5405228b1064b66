"""The charts of a study, from the rows that its figures draw."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from lab.analysis.curves import curves_of
from lab.analysis.differences import Place, place_of
from lab.analysis.sheet import NothingToDraw, Sheet, baselines, repeats, series_of, with_speedup
from lab.analysis.speedup import Row, unit_of
from lab.analysis.step_parts import stacked_bars
from lab.draw.looks import GREY
from lab.measure.intervals import Interval
from lab.web.texts import interval_text
from lab.web.vega import Chart, Spec, legend_columns, series_scales

PANEL, MOST_COLUMNS = 230, 4  # pixels of a panel, and panels side by side
LONG_LABEL = 40  # letters; with longer ones bars need all of a row
Commands = Mapping[Place, str]


def charts_of(sheet: Sheet, commands: Commands, prefix: str, left_out: list[str]) -> list[Chart]:
    """Make all charts for which the study has data.

    Args:
        commands: how to measure a point again, shown where the pointer rests.
        prefix: begins their names, which are unique on a page.
        left_out: is added to: the other charts, and why.
    """
    made: list[Chart] = []
    for make in (speedup, efficiency, throughput, step_time, payload, convergence):
        try:
            chart = make(sheet, commands)
        except NothingToDraw as why:
            left_out.append(f"{make.__name__.replace('_', ' ')}, {sheet.scaling} scaling: {why}")
            continue
        wide = chart.wide or chart.spec.get("columns", 1) > 2
        labels = map(sheet.label, series_of(sheet.rows))
        spec = chart.spec | {"usermeta": {"legend_columns": legend_columns(labels, wide)}}
        name = f"{prefix}{sheet.scaling}-{chart.name}"
        made.append(replace(chart, name=name, wide=wide, spec=spec))
    return made


def speedup(sheet: Sheet, commands: Commands) -> Chart:
    """Chart speedup against ranks."""
    rows = with_speedup(sheet)
    title = f"Speedup over {baselines(rows)}, {sheet.scaling} scaling"
    ideal = {
        "mark": {"type": "line", "color": GREY, "strokeDash": [2, 2]},
        "encoding": {
            "x": {"field": "ranks", "type": "quantitative"},
            "y": {"field": "ranks", "type": "quantitative"},
        },
    }
    data = _data(sheet, rows, commands, lambda row: row.speedup)
    spec = _lines(sheet, rows, data, "speedup", ideal)
    return Chart("speedup", title, f"dotted: ideal; {repeats(rows)}", spec)


def efficiency(sheet: Sheet, commands: Commands) -> Chart:
    """Chart efficiency, speedup divided by ranks."""
    rows = with_speedup(sheet)
    title = f"Efficiency: speedup / ranks, {sheet.scaling} scaling"
    ideal = {
        "mark": {"type": "rule", "color": GREY, "strokeDash": [2, 2]},
        "encoding": {"y": {"datum": 1}},
    }
    data = _data(sheet, rows, commands, lambda row: row.efficiency)
    spec = _lines(sheet, rows, data, "efficiency", ideal)
    return Chart("efficiency", title, f"dotted: ideal; {repeats(rows)}", spec)


def throughput(sheet: Sheet, commands: Commands) -> Chart:
    """Chart samples per second against ranks."""
    rows = [row for row in sheet.from_one_rank() if not math.isnan(row.samples_per_s.mid)]
    if not rows:
        raise NothingToDraw("no record gives samples_per_s")
    data = _data(sheet, rows, commands, lambda row: row.samples_per_s)
    spec = _lines(sheet, rows, data, f"{unit_of(rows)}s/s, all ranks")
    return Chart("throughput", f"Throughput, {sheet.scaling} scaling", repeats(rows), spec)


def step_time(sheet: Sheet, commands: Commands) -> Chart:
    """Chart the parts of a step as stacked bars."""
    stacked = stacked_bars(sheet)
    bars, order = stacked.bars, list(stacked.colours)
    data = [
        {
            "bar": f"{sheet.label(bar.row.series)}  N={bar.row.world_size}",
            "batch": bar.row.fixed_batch_size,
            "part": part,
            "order": order.index(part),
            "value": 1e3 * seconds,
            "text": f"{1e3 * seconds:.4g} ms",
            "emulated": bool(bar.row.emulation),
            "command": _command(commands, bar.row),
        }
        for bar in bars
        for part, seconds in bar.parts.items()
    ]
    looks = list(sheet.looks)
    ordered = sorted((bar.row.world_size, looks.index(bar.row.series)) for bar in bars)
    names = [f"{sheet.label(looks[at])}  N={size}" for size, at in dict.fromkeys(ordered)]
    used = [part for part in order if any(part in bar.parts for bar in bars)]
    encoding: Spec = {
        "y": {"field": "bar", "type": "nominal", "sort": names, "title": None},
        "x": {"field": "value", "type": "quantitative", "title": "step time (ms)"},
        "color": {
            "field": "part",
            "type": "nominal",
            "sort": used,
            "scale": {"domain": used, "range": [stacked.colours[part] for part in used]},
        },
        "order": {"field": "order"},
        "tooltip": _tooltip(bar="series", batch=sheet.batch_name(), part="part", text="time"),
    }
    mark = {"type": "bar", "stroke": "black", "strokeWidth": 0.4}
    spec = _panels(sheet, data, {"mark": mark, "encoding": encoding}, height={"step": 16})
    is_wide = spec["columns"] > 1 or max(map(len, names)) > LONG_LABEL
    return Chart("step_time", stacked.title, stacked.sample, spec, wide=is_wide)


def payload(sheet: Sheet, commands: Commands) -> Chart:
    """Chart the bytes that the busiest rank hands to the network in a step."""
    rows = [row for row in sheet.rows if row.payload_max_bytes > 0]
    if not rows:
        raise NothingToDraw("no finished run sent anything")
    data = _data(
        sheet,
        rows,
        commands,
        lambda row: Interval(math.nan, row.payload_max_bytes / 1e6, math.nan),
    )
    spec = _lines(sheet, rows, data, "MB per step, busiest rank", scale={"type": "log"})
    title = f"Payload handed to the network in a step, {sheet.scaling} scaling"
    return Chart("payload", title, "counted, not timed", spec)


def convergence(sheet: Sheet, commands: Commands) -> Chart:
    """Chart training loss and a test metric against steps and seconds, a run per series."""
    curves, kinds = curves_of(sheet)
    data = [
        {"series": sheet.label(one.cell.series), "kind": kind, **point}
        for one in curves
        for kind in kinds
        for point in one.tables[kind].to_dict("records")
        if math.isfinite(point["value"])
    ]
    with_data = {point["series"] for point in data}
    drawn = [row for row in sheet.rows if sheet.label(row.series) in with_data]
    scales = _scales(sheet, drawn)
    panels = [
        {
            "width": PANEL,
            "height": PANEL,
            "transform": [{"filter": {"field": "kind", "equal": kind}}],
            "mark": {"type": "line", "interpolate": "linear"},
            "encoding": {
                "x": {"field": x, "type": "quantitative", "title": title},
                "y": {
                    "field": "value",
                    "type": "quantitative",
                    "title": kind,
                    "scale": {"type": "log", "nice": False} if logarithmic else {"zero": False},
                },
                "color": scales["color"],
                "strokeDash": scales["strokeDash"],
                "tooltip": _tooltip(series="series", step="step", seconds="seconds", value=kind),
            },
        }
        for kind, logarithmic in kinds.items()
        for x, title in (("step", "step"), ("seconds", "training time (s)"))
    ]
    spec = {"data": {"values": data}, "concat": panels, "columns": 2}
    one = curves[0].cell
    title = f"Convergence at {one.world_size} ranks, {sheet.batch_name()} {one.fixed_batch_size}"
    return Chart("convergence", title, "one run per series: no intervals", spec)


def _data(
    sheet: Sheet, rows: Iterable[Row], commands: Commands, value: Callable[[Row], Interval]
) -> list[dict[str, Any]]:
    """Make a mark's data of each row; marks of one number of ranks stand a little apart."""
    names, sizes = list(sheet.looks), sorted({row.world_size for row in sheet.rows})
    spread = min(0.16, 0.04 * sizes[-1])
    return [
        {
            "series": sheet.label(row.series),
            "ranks": row.world_size,
            "x": row.world_size + spread * ((names.index(row.series) + 0.5) / len(names) - 0.5),
            "batch": row.fixed_batch_size,
            "value": value(row).mid,
            "low": _known(value(row).lo),
            "high": _known(value(row).hi),
            "text": interval_text(value(row)),
            "n": row.num_repeats,
            "emulated": bool(row.emulation),
            "command": _command(commands, row),
        }
        for row in rows
    ]


def _lines(
    sheet: Sheet,
    rows: list[Row],
    data: list[dict[str, Any]],
    title: str,
    below: Spec | None = None,
    scale: Spec | None = None,
) -> Spec:
    """Draw a line with intervals for each series, in a panel for each batch."""
    sizes = sorted({row.world_size for row in sheet.rows})
    x = {
        "field": "x",
        "type": "quantitative",
        "title": "ranks",
        "axis": {"values": sizes, "format": "d"},
        "scale": {"zero": False, "padding": 8},
    }
    y: Spec = {"field": "value", "type": "quantitative", "title": title}
    y |= {"scale": scale or {"zero": True}}
    scales = _scales(sheet, rows)
    faded = {"condition": {"param": "picked", "value": 1}, "value": 0.12}
    colour = {"color": scales["color"], "opacity": faded}
    tooltip = _tooltip(
        series="series",
        ranks="ranks",
        batch=sheet.batch_name(),
        text=title,
        n="repeats",
        emulated="emulated",
        command="command",
    )
    intervals: Spec = {
        "transform": [{"filter": "isValid(datum.low)"}],
        "mark": {"type": "rule", "strokeWidth": 1.4},
        "encoding": {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}, **colour},
    }
    layers: list[Spec] = [
        *([below] if below else []),
        {
            "mark": {"type": "line", "strokeWidth": 1.4},
            "encoding": {"x": x, "y": y, **colour, "strokeDash": scales["strokeDash"]},
        },
        *([intervals] if any(point["low"] is not None for point in data) else []),
        _points({"x": x, "y": y, "opacity": faded, "tooltip": tooltip}, scales),
    ]
    return _panels(sheet, data, {"layer": layers}, height=PANEL)


def _points(encoding: Spec, scales: Spec) -> Spec:
    """Mark points, hollow if emulated; a click on the legend picks a series."""
    picked = {"type": "point", "fields": ["series"]}
    hollow = {"condition": {"test": "datum.emulated", "value": "white"}, **scales["color"]}
    return {
        "params": [{"name": "picked", "select": picked, "bind": "legend"}],
        "mark": {"type": "point", "size": 55, "strokeWidth": 1.4},
        "encoding": {
            **encoding,
            **{"shape": scales["shape"], "stroke": scales["color"], "fill": hollow},
        },
    }


def _panels(sheet: Sheet, data: list[dict[str, Any]], panel: Spec, height: Any) -> Spec:
    """Repeat a panel for each batch."""
    batches = sorted({point["batch"] for point in data})
    header = {"labelExpr": f"'{sheet.batch_name()} ' + datum.value"}
    return {
        "data": {"values": data},
        "facet": {"field": "batch", "type": "ordinal", "title": None, "header": header},
        "columns": min(MOST_COLUMNS, len(batches)),
        "spec": {"width": PANEL, "height": height, **panel},
    }


def _scales(sheet: Sheet, rows: Iterable[Row]) -> Spec:
    labels = {series: sheet.label(series) for series in series_of(rows)}
    return series_scales(labels, sheet.looks)


def _tooltip(**titles: str) -> list[Spec]:
    return [{"field": field, "title": title} for field, title in titles.items()]


def _command(commands: Commands, row: Row) -> str:
    return commands.get(place_of(row), "")


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
