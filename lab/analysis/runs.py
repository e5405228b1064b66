"""Charts of single runs: their curves, a step's timeline, and the own work of its ranks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from lab.analysis.charts import PHASE_LOOKS, Frame, Looks, NothingToDraw, batch_name
from lab.analysis.points import CEILING
from lab.analysis.records import RecordedCell
from lab.draw.chart import INK, LABEL_PX, LETTER, ORANGE, WIDTH, Chart, alt
from lab.draw.plots import Axis, bars, fitted, joined, legend_columns, lines, round_values
from lab.draw.text import number_of, short_text
from lab.measure import OWN, Span
from lab.record.schema import Record, worded
from lab.record.trace import Timeline, lanes
from lab.settings.storage import DamagedFile
from lab.task import LOGARITHMIC, PERCENT, axis, main_metric, metrics_of

NUM_DRAWN, NUM_SMOOTHED = 400, 50  # points of a curve, and windows that smooth it
HIGH = 190  # pixels of a panel of curves
COMPUTE, LAYER, TRANSFER, CODEC = "compute", "layer", "exchange", "codec"
KINDS = {  # of spans: what the legend calls them, and their colours
    "data": ("Data", PHASE_LOOKS["data"]),
    "forward": ("Forward", PHASE_LOOKS["forward"]),
    "backward": ("Backward", PHASE_LOOKS["backward"]),
    LAYER: ("Layer", "#F0E442"),  # the yellow of Okabe and Ito, which stands out on blue
    "wait": ("Waits", "white"),
    "optimizer": ("Update", PHASE_LOOKS["update"]),
    TRANSFER: ("Transfer", PHASE_LOOKS["exchange"]),
    CODEC: ("Encode, decode", ORANGE),
}
ON_ONE_LINE = ("data", "forward", "backward", "wait", "optimizer")
DARK = ("data", "backward", "optimizer")  # names inside are white
Track = tuple[int, str, int]  # rank, compute or exchange, lane

MAX_RANKS = 8  # more would not be legible
TRACK, THIN = 24, 7  # pixels of a track, and of a piece within a bar
WAIT = "waits, and the rest"
OWN_COLOURS = {
    "between": ORANGE,
    "input": PHASE_LOOKS["data"],
    **{name: PHASE_LOOKS[name] for name in ("forward", "backward", "exchange", "update")},
    WAIT: "#E8E8E8",
}


def convergence(
    cells: Iterable[RecordedCell], scaling: str, looks: Looks, width: int = WIDTH
) -> Chart:
    """Chart training loss and a test metric against steps and seconds, one run per series.

    The point is the one with the most ranks, and of those the largest batch; the run is its
    lowest repeat. `none` has no line at several ranks: its replicas are not one model.

    Raises:
        NothingToDraw: no run of such a point kept losses or evaluations that change.
    """
    known = list(cells)
    runs = _representatives(known, scaling, looks)
    shown = {run.label: looks[run.series] for run in runs}
    metric = main_metric(
        name for run in runs for e in run.record.evaluations for name in metrics_of(e)
    )
    label, factor = axis(metric)
    try:
        curves = {
            "training loss": {run.label: _losses(run) for run in runs},
            label: {run.label: _evaluated(run, metric, factor) for run in runs},
        }
    except DamagedFile as error:
        raise NothingToDraw(str(error)) from None
    kinds = {kind: each for kind, each in curves.items() if any(map(_changes, each.values()))}
    if not kinds:
        raise NothingToDraw("no run recorded a loss or a test result that changes")
    columns, size = fitted(2, LETTER * LABEL_PX * max(map(len, shown)), width, HIGH)
    panels = [
        _curves(tables, x, kind, shown, width // columns, metric in LOGARITHMIC and kind == label)
        for kind, tables in kinds.items()
        for x in ({"step": "step"}, {"seconds": "training time (s)"})
    ]
    body = joined(panels, columns)
    one, repeated = runs[0], sorted({run.repeat for run in runs})
    about = [
        f"On {number_of(one.world_size, 'rank')}, {batch_name(scaling)} {one.fixed_batch_size}; "
        f"one run per series (repeat {', '.join(map(str, repeated))}), so no intervals."
    ]
    labels = {cell.series: cell.label for cell in known}
    absent = [labels[name] for name in looks if labels[name] not in shown]
    if one.world_size > 1 and any(cell.strategy == CEILING for cell in known):
        about.append("Left out: `none`, because each of its ranks trains a model of its own.")
        absent = [name for name in absent if name.split(" ")[0] != CEILING]
    about += [f"No finished run at this point: {', '.join(absent)}."] if absent else []
    return Chart(
        "convergence", _learnt(kinds, metric if label in kinds else ""), about, body, width
    )


def _representatives(
    cells: Sequence[RecordedCell], scaling: str, looks: Looks
) -> list[RecordedCell]:
    done = [
        cell
        for cell in cells
        if (cell.status, cell.measure, cell.scaling) == ("done", "throughput", scaling)
        and (cell.strategy != CEILING or cell.world_size == 1)
    ]
    if not done:
        raise NothingToDraw(
            "no finished throughput run (strategy=none on several ranks does not count)"
        )
    largest = max((cell.world_size, cell.fixed_batch_size) for cell in done)
    here = [cell for cell in done if (cell.world_size, cell.fixed_batch_size) == largest]
    here.sort(key=lambda cell: (cell.repeat, cell.record.started_at or ""))
    first = {cell.series: cell for cell in reversed(here)}
    return [first[name] for name in looks if name in first]


def _losses(cell: RecordedCell) -> Frame:
    """Average over ranks, smooth by a running mean, and thin to at most `NUM_DRAWN` points."""
    steps = cell.steps()
    if steps is None or bool(np.isnan(steps["loss"].to_numpy(float)).all()):
        return pd.DataFrame()
    by_step = steps.groupby("step").agg({"end_s": "max", "loss": "mean"}).reset_index()
    window = max(1, len(by_step) // NUM_SMOOTHED)
    by_step["loss"] = by_step["loss"].rolling(window, min_periods=1).mean()
    thin = by_step.iloc[:: -math.ceil(len(by_step) / NUM_DRAWN)].iloc[::-1]  # with the last step
    return thin.rename(columns={"end_s": "seconds", "loss": "value"})


def _evaluated(cell: RecordedCell, metric: str, factor: float) -> Frame:
    rows = [e for e in cell.record.evaluations if e.get(metric) is not None]
    table = pd.DataFrame(rows, columns=["step", "seconds", metric])
    return table.assign(value=factor * table[metric].astype(float))


def _changes(table: Frame) -> bool:
    """Return whether a curve is more than a level line, as of runs that do not learn."""
    return not table.empty and bool(np.ptp(table["value"]) > 1e-6 * table["value"].abs().max())


def _curves(
    tables: Mapping[str, Frame],
    x: Mapping[str, str],
    kind: str,
    looks: Looks,
    width: int,
    logarithmic: bool,
) -> Any:
    """Draw the curves of one kind against one column."""
    ((column, title),) = x.items()
    data: Frame = pd.concat(
        table[[column, "value"]].rename(columns={column: "x"}).assign(series=name)
        for name, table in tables.items()
        if not table.empty
    )
    data = data[np.isfinite(data["value"])].assign(low=math.nan, high=math.nan)
    low, high = float(data["value"].min()), float(data["value"].max())
    reach = (low / 1.1, 1.1 * high) if logarithmic else _around(low, high)
    ticks = _few_ticks(*reach) if logarithmic else None
    drawn = {name: look for name, look in looks.items() if name in set(data["series"])}
    y = Axis(kind, log=10 if logarithmic else 0, domain=reach, ticks=ticks)
    across = Axis(title, domain=(float(data["x"].min()), float(data["x"].max())))
    return lines(data, across, y, drawn, marks=False, size=(width, HIGH), width=width)[0]


def _around(low: float, high: float) -> tuple[float, float]:
    margin = 0.05 * (high - low or abs(high))
    return low - margin, high + margin


def _few_ticks(low: float, high: float) -> list[float]:
    """Return labels of a logarithmic axis, also if it spans less than a decade."""
    known = round_values(low, high)
    return known if len(known) > 2 else [float(f"{v:.2g}") for v in np.geomspace(low, high, 4)]


def _learnt(kinds: Mapping[str, Mapping[str, Frame]], metric: str) -> str:
    """Say where the curves end: of the metric if it was evaluated, else of the loss."""
    kind = list(kinds)[-1]
    ends = {name: float(t["value"].iloc[-1]) for name, t in kinds[kind].items() if not t.empty}
    unit = " %" if metric in PERCENT else ""
    what = metric or kind
    best = (max if metric in PERCENT else min)(ends, key=lambda name: ends[name])
    low, high = (short_text(end) for end in (min(ends.values()), max(ends.values())))
    if low == high:
        return f"{what[0].upper()}{what[1:]} ends at {low}{unit}"
    better = "highest" if metric in PERCENT else "lowest"
    return f"{what[0].upper()}{what[1:]} ends at {low} to {high}{unit}, {better} with {best}"


def timeline_of_step(timeline: Timeline, width: int = WIDTH) -> Chart:
    """Chart bars along time: per rank, a track of computation and one or more of transfers.

    Args:
        timeline: of one step, so that bars are wide enough for their names.
    """
    num_ranks = len({span.rank for span in timeline.spans})
    about = timeline.about
    facts = ("model", "batch_size", "scaling", "device", "source")
    known = " · ".join(f"{key} {about[key]}" for key in facts if key in about)
    notes = [known] if known else []
    notes += [f"The first {MAX_RANKS} of {num_ranks} ranks."] if num_ranks > MAX_RANKS else []
    how = _emulated(timeline)
    notes += [f"Pale: emulated ({how})."] if how else []
    shown = [span for span in timeline.spans if span.rank < MAX_RANKS]
    return Chart("timeline", _waits(timeline), notes, _drawn(shown, width, bool(how)), width)


def timeline_of_run(timeline: Timeline, title: str, width: int = WIDTH) -> Chart:
    """Chart the spans of all ranks in all steps, to zoom into.

    Args:
        title: says which run it is.
    """
    clocks = str(timeline.about.get("clocks") or "whether ranks share a clock is not recorded")
    how = _emulated(timeline)
    body = _drawn([*timeline.spans], width, bool(how))
    body = body.add_params(alt.selection_interval(name="zoom", encodings=["x"], bind="scales"))
    notes = [clocks, *([f"Pale: emulated ({how})."] if how else [])]
    return Chart("timeline", _waits(timeline, title), notes, body, width)


def _drawn(spans: list[Span], width: int, pale: bool) -> Any:
    """Draw transfers that overlap below each other, and pieces as narrower bars.

    Pieces are layers within forward and backward, and encoding and decoding within a transfer.
    """
    spans = [span for span in spans if span.row in KINDS]
    origin = min(span.start_s for span in spans)
    length_s = max(span.end_s for span in spans) - origin
    placed = tracks_of(spans)
    names = {track: _track_name(*track) for track in sorted({track for _, track in placed})}
    room = LETTER * LABEL_PX * max(map(len, names.values()))
    wide = int(width - room - 30)
    whole = [(span, track, _fitting_name(span, wide / length_s)) for span, track in placed]
    pieces = [(span, track, None) for span, track in pieces_of(spans, placed)]
    data = pd.DataFrame(
        {
            **{"track": names[track], "kind": KINDS[span.row][0], "name": span.name},
            **{"start": 1e3 * (span.start_s - origin), "end": 1e3 * (span.end_s - origin)},
            **{"label": text, "thin": text is None, "dark": span.row in DARK},
        }
        for span, track, text in whole + pieces
    )
    drawn = {span.row for span in spans}
    colour_of = dict(KINDS[row] for row in KINDS if row in drawn)
    words = [*colour_of]
    colours = alt.Scale(domain=words, range=[*colour_of.values()])
    legend = alt.Legend(columns=legend_columns(words, width), symbolStrokeColor=INK)
    data["time"] = [
        f"{short_text(b - a, 4)} ms, from {short_text(a, 4)} ms"
        for a, b in zip(data["start"], data["end"], strict=True)
    ]
    scale = alt.Scale(domain=[0, 1e3 * length_s], nice=False)
    base = alt.Chart().encode(
        alt.X("start:Q", title="time from the beginning (ms)", scale=scale),
        alt.Y("track:N", sort=[*names.values()], title=None, axis=alt.Axis(minExtent=room)),
    )
    look: dict[str, Any] = {"stroke": INK, "strokeWidth": 0.4, "clip": True}
    bar: dict[str, Any] = {
        "x2": alt.X2("end:Q"),
        "color": alt.Color("kind:N", sort=words, scale=colours, legend=legend),
        "opacity": alt.value(0.6 if pale else 1.0),
        "tooltip": [f"{name}:N" for name in ("track", "kind", "name", "time")],
    }
    up = 4 if pieces else 0  # names make room for pieces
    text = base.mark_text(fontSize=LABEL_PX - 1, dy=-up, clip=True)
    text = text.transform_filter("!datum.thin && datum.label")
    middle = text.transform_calculate(middle="(datum.start + datum.end) / 2")
    white = alt.condition("datum.dark", alt.value("white"), alt.value(INK))
    return alt.layer(
        base.mark_bar(height=TRACK - 4, **look).transform_filter("!datum.thin").encode(**bar),
        base.mark_bar(height=THIN, yOffset=(TRACK - 4 - THIN) / 2, **look)
        .transform_filter("datum.thin")
        .encode(**bar),
        middle.encode(alt.X("middle:Q", scale=scale), alt.Text("label:N"), color=white),
    ).properties(data=data, width=wide, height=alt.Step(TRACK))


def tracks_of(spans: list[Span]) -> list[tuple[Span, Track]]:
    """Assign spans to tracks; computation never overlaps itself. Pieces have none."""
    transfers = lanes(span for span in spans if span.row == TRANSFER)
    return [
        *((span, (span.rank, COMPUTE, 0)) for span in spans if span.row in ON_ONE_LINE),
        *((span, (span.rank, TRANSFER, lane)) for span, lane in transfers),
    ]


def pieces_of(spans: list[Span], placed: list[tuple[Span, Track]]) -> list[tuple[Span, Track]]:
    """Assign layers to the computation, and codec spans to the transfers they are pieces of."""
    transfers = defaultdict[tuple[int, str], list[tuple[Span, Track]]](list)
    for span, track in placed:
        if span.row == TRANSFER:
            transfers[span.rank, span.name].append((span, track))
    layers = [(span, (span.rank, COMPUTE, 0)) for span in spans if span.row == LAYER]
    return layers + [
        (piece, track)
        for piece in spans
        if piece.row == CODEC
        for span, track in transfers[piece.rank, piece.name]
        if span.start_s <= piece.start_s <= span.end_s
    ]


def _track_name(rank: int, kind: str, lane: int) -> str:
    if kind == COMPUTE:
        return f"rank {rank}"
    return f"rank {rank} transfers{'' if lane == 0 else f' {lane + 1}'}"


def _fitting_name(span: Span, pixels_per_s: float) -> str:
    """Return as much of the name as fits into the bar, possibly nothing."""
    first = span.name.split(" ")[0]  # the first of a bucket's parameters
    names = (span.name, first, first.rpartition(".")[0])
    names = names if span.row == TRANSFER else KINDS[span.row][:1]
    letters = (span.end_s - span.start_s) * pixels_per_s / (LETTER * LABEL_PX) - 1
    return next((name for name in names if len(name) < letters), "")


def _emulated(timeline: Timeline) -> str:
    emulation = str(timeline.about.get("emulation") or "none")
    return "" if emulation == "none" else emulation


def _waits(timeline: Timeline, run: str = "") -> str:
    """Say how long the steps of a run are, and how much of them ranks wait for exchanges."""
    about, spans = timeline.about, timeline.spans
    ranks, steps = {span.rank for span in spans}, {s.name for s in spans if s.row == "step"}
    length_s = max(s.end_s for s in spans) - min(s.start_s for s in spans)
    waits_s = sum(s.end_s - s.start_s for s in spans if s.row == "wait") / len(ranks)
    several = f"{len(steps)} steps" if len(steps) > 1 else "A step"
    step = str(about["step"]).capitalize() if "step" in about else several
    on_ranks = number_of(int(about.get("world_size", len(ranks))), "rank")
    of = run or f"{about.get('strategy', 'a run')} on {on_ranks}"
    share = f"{100 * waits_s / length_s:.0f} %"
    return f"{step} of {of}: {short_text(1e3 * length_s)} ms, of which {share} is waiting"


def own_work(steps: pd.DataFrame) -> pd.DataFrame:
    """Return mean seconds of a timed step by rank: columns of OWN that are known, and WAIT.

    Means add up to the step and the gap before it, and show what is rare as well.

    Raises:
        ValueError: the run is older than own times, or timed no step.
    """
    columns = {f"own_{name}_s": name for name in OWN}
    if not set(columns) <= set(steps.columns) or not bool(steps["timed"].to_numpy().any()):
        raise ValueError(
            "its steps.parquet lacks the times of each rank's own work, or has no timed step"
        )
    timed: Any = steps[steps["timed"]]
    # In a round, most steps exchange nothing, and take no time for it.
    known = {name: 0.0 for name in columns if timed[name].notna().any()}
    means = timed.fillna(known).groupby("rank").mean(numeric_only=True)
    own = means[list(columns)].rename(columns=columns).dropna(axis=1, how="all")
    turn_s = means["step_s"] + means["own_between_s"]
    own[WAIT] = (turn_s - own.sum(axis=1)).clip(lower=0.0)
    return own


def own_work_of_ranks(steps: pd.DataFrame, record: Record, width: int = WIDTH) -> Chart:
    """Chart a stacked bar per rank: a slow rank has a long part where the others wait.

    Raises:
        ValueError: see own_work.
    """
    own = own_work(steps)
    data = pd.DataFrame(
        {
            "name": f"rank {rank}",
            "part": part,
            "value": 1e3 * seconds,
            "hollow": bool(record.emulation),
        }
        for rank, parts in own.iterrows()
        for part, seconds in parts.items()
        if not math.isnan(seconds)
    )
    colours = {part: colour for part, colour in OWN_COLOURS.items() if part in own}
    work_ms = 1e3 * own.drop(columns=WAIT).sum(axis=1)
    slow = work_ms.idxmax()
    most, others = float(work_ms.max()), float(work_ms.drop(slow).median())
    least_ms, most_ms, others_ms = map(short_text, (float(work_ms.min()), most, others))
    message = f"Work is even across ranks: {least_ms} to {most_ms} ms per step"
    if not most <= 1.05 * others:  # NaN: there is one rank
        message = f"Rank {slow} works {most_ms} ms per step"
        message += "" if math.isnan(others) else f", the median of the others {others_ms} ms"
    about = [
        f"Each rank's own work with {record.strategy}, model {record.model} · batch_size "
        f"{record.batch_size} · device {record.device}: means of timed steps, including the gap "
        "before each step."
    ]
    about += [f"Pale: emulated ({worded(record.emulation)})."] if record.emulation else []
    body, _ = bars(data, "ms per step", colours, width=width - 60)
    return Chart("ranks", message, about, body, width)
