"""Show where the time of a step goes: by layer for one set of settings, by kind for several."""

from __future__ import annotations

from typing import Any

from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from lab.benchmarks.views.text import about, machine, ranged
from lab.draw import style
from lab.draw.looks import BLACK, BROWN, COLOURS, GREEN, ORANGE, SKY, VERMILLION
from lab.layers.parts import PASSES, backward_ratio, bias_seconds, by_kind, passes_of

MS = 1e3
NAMED_KINDS = 4
OTHERS, REST = "other layers", "rest of the step"
CONVOLUTIONS = ("Conv1d", "Conv2d", "Conv3d")
PHASED = ("forward", "backward")
MOST_BARS = 60  # layers; of more, kinds are drawn
PASS_COLOURS: dict[str, str] = dict(zip(PASSES, (SKY, ORANGE, GREEN, VERMILLION), strict=True))
HEADER = ["", "", *(f"{name} (ms)" for name in PASSES), "of the step %"]


def table(result: dict[str, Any]) -> list[list[str]]:
    """List the layers and the rest, or for several sets of settings their kinds."""
    rows = result["rows"]
    lines = [HEADER]
    for row in rows:
        step_s = row["step_s"]["median"]
        if len(rows) > 1:
            lines.append([_label(result, row), *[""] * (len(HEADER) - 1)])
        else:
            lines += [
                _line(each["name"], each["kind"], passes_of(each), step_s) for each in row["layers"]
            ]
        kinds = by_kind(row["layers"])
        lines += [_line("all", kind, passes, step_s) for kind, passes in kinds.items()]
        lines += [_whole(f"({name})", value, step_s) for name, value in _rest(row).items()]
        lines += [_whole("step", row["step_s"], step_s)]
    return lines


def notes(result: dict[str, Any]) -> list[str]:
    """Compare sums with steps, and explain the columns."""
    lines = []
    for row in result["rows"]:
        name = f"{_label(result, row)}: " if len(result["rows"]) > 1 else ""
        if row["layers"]:
            lines.append(
                f"{name}layers and rest add up to {ranged(row['sum_ratio'])} of a step without "
                "clocks on its modules"
            )
        if ratio := backward_ratio(row["layers"], CONVOLUTIONS):
            passes = sum(
                sum(by_kind(row["layers"]).get(kind, {}).values()) for kind in CONVOLUTIONS
            )
            share = 100 * passes / row["step_s"]["median"]
            lines.append(
                f"{name}convolutions take {share:.3g} % of the step, backward {ratio:.3g} times as "
                "long as forward"
            )
        if biases := bias_seconds(row["layers"]):
            share = 100 * biases / row["step_s"]["median"]
            lines.append(
                f"{name}biases take {MS * biases:.3g} ms as operations of their own, {share:.2g} % "
                "of the step; libraries compute them with the products"
            )
        if row["input_grad_s"]:
            cost = ranged(row["input_grad_s"], MS)
            lines.append(f"{name}the gradient of the model's input costs {cost} ms")
    return [
        *lines,
        f"medians of {result['num_rounds']} rounds, steps with and without clocks in turns; "
        "[95 % intervals]",
        "a module's own work; backward is divided by the times of both parts measured alone, or "
        "stays whole where one kernel computes both",
    ]


def figure(result: dict[str, Any]) -> Figure:
    """Draw a bar for each layer, or for each set of settings."""
    rows = result["rows"]
    if len(rows) > 1 or not rows[0]["layers"]:
        return _kinds(result)
    layers = {f"{each['name']} {each['kind']}": passes_of(each) for each in rows[0]["layers"]}
    if len(layers) > MOST_BARS:
        layers = by_kind(rows[0]["layers"])
    drawn, axes = style.canvas(1, 1, 8.0, 0.19 * len(layers) + 1.8)
    panel = axes[0][0]
    for place, passes in enumerate(layers.values()):
        _bar(panel, place, {name: MS * value for name, value in passes.items()}, PASS_COLOURS)
    panel.set_yticks(range(len(layers)), list(layers), fontsize=7)
    panel.set_ylim(len(layers) - 0.5, -0.5)
    panel.set_xlim(0, 1.05 * MS * max(sum(passes.values()) for passes in layers.values()))
    panel.set_xlabel("ms per step")
    panel.grid(axis="x", linewidth=0.4)
    used = [name for name in PASSES if any(passes[name] for passes in layers.values())]
    handles: list[Artist] = [Patch(facecolor=PASS_COLOURS[name], label=name) for name in used]
    row = rows[0]
    title = f"Layers of {result['models'][0]}, batch {row['batch_size']}"
    step = f"step {MS * row['step_s']['median']:.4g} ms"
    return style.frame(drawn, title, handles, [f"{_where(result)} · {step}", *about(result)])


def _kinds(result: dict[str, Any]) -> Figure:
    rows, models = result["rows"], list(dict.fromkeys(result["models"]))
    largest = by_kind(layer for row in rows for layer in row["layers"])
    # Models differ in time by orders of magnitude, so they are compared by shares.
    step_s = [row["step_s"]["median"] for row in rows]
    units = [MS] * len(rows) if len(models) == 1 else [100 / each for each in step_s]
    parts = [
        {name: unit * seconds for name, seconds in _parts(row, list(largest)[:NAMED_KINDS]).items()}
        for row, unit in zip(rows, units, strict=True)
    ]
    names = list(dict.fromkeys(name for each in parts for name in each))
    names.sort(key=lambda name: name in (OTHERS, REST))
    colours = dict(zip(names, (*COLOURS, BROWN), strict=False)) | {REST: style.GREY}
    drawn, axes = style.canvas(1, 1, 8.0, 0.38 * len(rows) + 1.8)
    panel = axes[0][0]
    for place, (each, unit) in enumerate(zip(parts, units, strict=True)):
        _bar(panel, place, {name: each.get(name, 0.0) for name in names}, colours)
        panel.plot(unit * step_s[place], place, color=BLACK, marker="|", ms=14)
    panel.set_yticks(range(len(rows)), [_label(result, row) for row in rows])
    panel.set_ylim(len(rows) - 0.5, -0.5)
    panel.set_xlim(0)
    panel.set_xlabel("ms per step" if len(models) == 1 else "% of a step without clocks")
    panel.grid(axis="x", linewidth=0.4)
    handles: list[Artist] = [Patch(facecolor=colours[name], label=name) for name in names]
    handles.append(Line2D([], [], color=BLACK, marker="|", ms=10, ls="", label="step, no clocks"))
    title = f"A step of {models[0] if len(models) == 1 else 'each model'} by kind of layer"
    return style.frame(drawn, title, handles, [_where(result), *about(result)])


def _parts(row: dict[str, Any], named: list[str]) -> dict[str, float]:
    """Return seconds by kind of layer, and of all the rest; of a compiled step by phase."""
    if row["compiled"]:
        parts = {f"{way}, compiled": row["phases_s"][way]["median"] for way in PHASED}
        parts[REST] = max(0.0, row["step_s"]["median"] - sum(parts.values()))
    else:
        parts = {}
        for kind, passes in by_kind(row["layers"]).items():
            name = kind if kind in named else OTHERS
            parts[name] = parts.get(name, 0.0) + sum(passes.values())
        parts[REST] = sum(value["median"] for value in row["rest_s"].values())
    return parts


def _label(result: dict[str, Any], row: dict[str, Any]) -> str:
    """Name a row by its model and batch if no two have the same, and else by its settings."""
    models = result["models"]
    if len(models) > 1 and len(set(models)) == len(models):
        return f"{models[result['rows'].index(row)]}, batch {row['batch_size']}"
    return row["name"] if "=" in row["name"] else f"batch_size={row['name']}"


def _rest(row: dict[str, Any]) -> dict[str, dict[str, float]]:
    return row["phases_s"] if row["compiled"] else row["rest_s"]


def _bar(panel: Any, place: int, parts: dict[str, float], colours: dict[str, str]) -> None:
    begin = 0.0
    for name, width in parts.items():
        panel.barh(place, width, 0.7, left=begin, color=colours[name], edgecolor="white", lw=0.3)
        begin += width


def _where(result: dict[str, Any]) -> str:
    threads = result["environment"]["num_threads"]
    text = f"{threads} thread{'s' if threads > 1 else ''}"
    return f"{machine(result)}, {text} · medians of {result['num_rounds']} rounds"


def _line(name: str, kind: str, passes: dict[str, float], step_s: float) -> list[str]:
    times = [f"{MS * passes[each]:.3f}" if passes[each] else "-" for each in PASSES]
    return [name, kind, *times, f"{100 * sum(passes.values()) / step_s:.1f}"]


def _whole(name: str, value: dict[str, float], step_s: float) -> list[str]:
    blank = [""] * (len(PASSES) - 1)
    share = f"{100 * value['median'] / step_s:.1f}"
    return [name, "", f"{MS * value['median']:.3f}", *blank, share]
