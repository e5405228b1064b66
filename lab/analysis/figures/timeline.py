"""Figure: the computation and transfers of each rank in a step, as in Kim et al., slide 27."""

from __future__ import annotations

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from lab.analysis.tracks import (
    CODEC,
    COLOURS,
    COMPUTE,
    LAYER,
    NAMES,
    TRANSFER,
    Track,
    pieces_of,
    tracks_of,
)
from lab.draw import style
from lab.draw.page import SCREEN, Page
from lab.measure.spans import Span
from lab.record.trace import Timeline

MAX_RANKS = 8  # more would not be legible
LETTER_INCHES = 0.075  # per letter of a name inside a bar
LABEL_INCHES = 0.65  # width of "Backward"
ABOVE_PIECES = 0.12  # share of a row's height by which a name moves to make room
WIDTH = 10.0


def timeline_of_step(timeline: Timeline, page: Page = SCREEN) -> Figure:
    """Draw bars along time: per rank, a track of computation and one or more of transfers.

    Transfers that overlap lie below each other. Pieces are narrower bars: layers within forward and
    backward, and encoding and decoding within a transfer. Bars of an emulated run are hatched.

    Args:
        timeline: of one step, so that bars are wide enough for their names.
    """
    num_ranks = len({span.rank for span in timeline.spans})
    spans = [span for span in timeline.spans if span.rank < MAX_RANKS and span.row in COLOURS]
    origin = min(span.start_s for span in spans)
    end = max(span.end_s for span in spans)
    heights, ticks = _rows(spans)
    figure, axes = style.canvas(1, 1, WIDTH, 1.5 + 0.34 * (max(heights.values()) + 1), page)
    panel = axes[0][0]
    width = WIDTH - style.LEGEND_ROOM if page.width_in is None else page.width_in
    hatch = style.HATCH if _emulated(timeline) else None
    pieced = _rows_with_pieces(spans)
    for span, height, thick in _bars(spans, heights):
        left, length = 1e3 * (span.start_s - origin), 1e3 * (span.end_s - span.start_s)
        low = height + 0.4 - 0.8 * thick
        colour = COLOURS[span.row]
        shape = [(left, length)], (low, 0.8 * thick)
        panel.broken_barh(*shape, facecolor=colour, edgecolor="black", linewidth=0.4, hatch=hatch)
        if thick == 1 and (name := _fitting_name(span, (width - 1) / (end - origin))):
            up = ABOVE_PIECES if span.row in pieced else 0.0
            _label(panel, name, left + length / 2, height - up, span.row)
    panel.set_xlim(0, 1e3 * (end - origin))
    panel.set_yticks([height for height, _ in ticks], [name for _, name in ticks])
    panel.set_ylim(max(heights.values()) + 0.6, -0.6)
    panel.set_xlabel("time from the beginning of the step (ms)")
    panel.grid(axis="x", linewidth=0.4)
    return style.frame(
        figure, _title(timeline), _legend(spans, hatch), _footer(timeline, num_ranks), page
    )


def _rows(spans: list[Span]) -> tuple[dict[Track, float], list[tuple[float, str]]]:
    """Return the height of each track, and the label of the first of its kind."""
    heights: dict[Track, float] = {}
    ticks: list[tuple[float, str]] = []
    down = 0.0
    for place in sorted({place for _, place in tracks_of(spans)}):
        rank, kind, lane = place
        if kind == COMPUTE and heights:
            down += 0.5  # between ranks
        heights[place] = down
        if lane == 0:
            ticks.append((down, f"rank {rank}" if kind == COMPUTE else "transfers"))
        down += 1
    return heights, ticks


def _bars(spans: list[Span], heights: dict[Track, float]) -> list[tuple[Span, float, float]]:
    """List every span with its height and its share of a track's thickness."""
    placed = tracks_of(spans)
    whole = [(span, heights[place], 1.0) for span, place in placed]
    pieces = [(piece, heights[place], 0.35) for piece, place in pieces_of(spans, placed)]
    return [*whole, *pieces]


def _rows_with_pieces(spans: list[Span]) -> set[str]:
    rows = {span.row for span in spans}
    within = {LAYER: {"forward", "backward"}, CODEC: {TRANSFER}}
    return {row for piece, wholes in within.items() if piece in rows for row in wholes}


def _fitting_name(span: Span, inches_per_s: float) -> str:
    """Return as much of the name as fits into the bar, possibly nothing."""
    first = span.name.split(" ")[0]  # the first of a bucket's parameters
    names = (span.name, first, first.rpartition(".")[0])
    room = (span.end_s - span.start_s) * inches_per_s
    fitting = (name for name in names if len(name) * LETTER_INCHES < room)
    return next(fitting, "") if span.row == TRANSFER else NAMES[span.row] * (room > LABEL_INCHES)


def _label(panel: Axes, name: str, middle: float, height: float, row: str) -> None:
    box = {"facecolor": COLOURS[row], "edgecolor": "none", "pad": 0.6}  # no hatching behind it
    colour = "white" if row in ("data", "backward", "optimizer") else "black"
    panel.text(middle, height, name, size=7, ha="center", va="center", color=colour, bbox=box)


def _legend(spans: list[Span], hatch: str | None) -> list[Artist]:
    used = {span.row for span in spans}
    entries: list[Artist] = [
        Patch(facecolor=COLOURS[row], edgecolor="black", label=name)
        for row, name in NAMES.items()
        if row in used
    ]
    if hatch:
        entries.append(
            Patch(facecolor="white", edgecolor=style.GREY, hatch=hatch, label="emulated")
        )
    return entries


def _emulated(timeline: Timeline) -> str:
    emulation = str(timeline.about.get("emulation") or "none")
    return "" if emulation == "none" else emulation


def _title(timeline: Timeline) -> str:
    about = timeline.about
    step = f"{about['step'].capitalize()} of" if "step" in about else "Timeline of"
    return f"{step} {about.get('strategy', 'a run')} on {about.get('world_size', '?')} ranks"


def _footer(timeline: Timeline, num_ranks: int) -> list[str]:
    facts = ("model", "batch_size", "scaling", "device", "source")
    known = [f"{key} {timeline.about[key]}" for key in facts if key in timeline.about]
    left_out = f"the first {MAX_RANKS} of {num_ranks} ranks" if num_ranks > MAX_RANKS else ""
    how = _emulated(timeline)
    return [" · ".join(known), left_out, f"emulated: {how}" if how else ""]
