"""The timeline of a run: the spans of all its ranks on one axis."""

from __future__ import annotations

from lab.analysis.tracks import COLOURS, NAMES, pieces_of, tracks_of
from lab.measure.spans import Span
from lab.record.trace import Timeline
from lab.web.vega import Chart, Spec

HEIGHT, WIDTH = 22, 900  # pixels of a track, and of the axis
ZOOM = {"name": "zoom", "select": {"type": "interval", "encodings": ["x"]}, "bind": "scales"}


def timeline_chart(name: str, title: str, timeline: Timeline) -> Chart:
    """Chart the spans of a run.

    Args:
        name: identifies it on the page.
    """
    spans = [span for span in timeline.spans if span.row in COLOURS]
    origin = min(span.start_s for span in spans)
    placed = tracks_of(spans)
    names = {track: _track_name(*track) for track in sorted({track for _, track in placed})}
    whole = [_datum(span, names[track], origin, False) for span, track in placed]
    pieces = pieces_of(spans, placed)
    data = whole + [_datum(span, names[track], origin, True) for span, track in pieces]
    kinds = [row for row in NAMES if any(span.row == row for span in spans)]
    spec: Spec = {
        "data": {"values": data},
        "width": WIDTH,
        "height": {"step": HEIGHT},
        "layer": _layers(kinds, [*names.values()]),
    }
    clocks = str(timeline.about.get("clocks") or "whether ranks share a clock is not recorded")
    return Chart(name, title, clocks, spec)


def _layers(kinds: list[str], tracks: list[str]) -> list[Spec]:
    """Encode bars of these kinds on these tracks, and the narrower bars of pieces above them."""
    titles = {"kind": "what", "name": "bucket or phase", "track": "where", "text": "time"}
    words = [NAMES[kind] for kind in kinds]
    scale = {"domain": words, "range": [COLOURS[kind] for kind in kinds]}
    encoding: Spec = {
        "x": {
            "field": "start",
            "type": "quantitative",
            "title": "time since the first of these steps began (ms)",
            "scale": {"nice": False},
        },
        "x2": {"field": "end"},
        "y": {"field": "track", "type": "nominal", "sort": tracks, "title": None},
        "color": {"field": "kind", "type": "nominal", "sort": words, "scale": scale},
        "tooltip": [{"field": field, "title": title} for field, title in titles.items()],
    }
    bar = {"type": "bar", "stroke": "black", "strokeWidth": 0.4, "clip": True}
    return [
        {
            "params": [ZOOM] if wide else [],
            "transform": [{"filter": "!datum.thin" if wide else "datum.thin"}],
            "mark": {**bar, "height": {"band": 0.85 if wide else 0.35}},
            "encoding": encoding,
        }
        for wide in (True, False)
    ]


def _datum(span: Span, track: str, origin: float, thin: bool) -> dict[str, object]:
    start, end = 1e3 * (span.start_s - origin), 1e3 * (span.end_s - span.start_s)
    return {
        "track": track,
        "kind": NAMES[span.row],
        "name": span.name,
        "start": round(start, 4),
        "end": round(start + end, 4),
        "text": f"{end:.4g} ms, from {start:.4g} ms",
        "thin": thin,
    }


def _track_name(rank: int, kind: str, lane: int) -> str:
    if kind == "compute":
        return f"rank {rank}"
    return f"rank {rank} transfers{'' if lane == 0 else f' {lane + 1}'}"
