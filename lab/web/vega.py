"""Vega-Lite in the style of the lab's figures: one specification, drawn here and in a browser."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from vl_convert import javascript_bundle, vegalite_to_svg

from lab.codec.build import cache_folder
from lab.draw.looks import Look
from lab.settings.whole import write_atomically

Spec = dict[str, Any]
VL_VERSION = "6.4"  # of Vega-Lite, one of those that vl-convert has
LICENSE = Path(__file__).parent / "assets" / "vega_license.txt"
CLIP = re.compile(r"(?<=\bid=\")clip\d+(?=\")|(?<=url\(#)clip\d+(?=\))")
ROLE = re.compile(r' (?:role|aria-roledescription|aria-label)="[^"]*"')
COLUMN = 560  # pixels of half a page
INK, GRID = "#1a1a1a", "#d9d9d9"
DASHES: dict[str, list[int]] = {"-": [1, 0], "--": [5, 3], ":": [1.5, 2.5], "-.": [6, 2, 1.5, 2]}  # pyright: ignore[reportAssignmentType]
CONFIG: Spec = {
    "background": None,
    "aria": False,  # the figure around a chart is named instead; tables hold its numbers
    "font": "system-ui, sans-serif",
    "view": {"stroke": None},
    "axis": {
        **{"labelColor": INK, "titleColor": INK, "domainColor": INK, "tickColor": INK},
        **{
            "gridColor": GRID,
            "labelFontSize": 11,
            "titleFontSize": 12,
            "titleFontWeight": "normal",
        },
        "labelOverlap": True,
    },
    "axisY": {"labelLimit": 480},
    "legend": {
        **{"labelColor": INK, "titleColor": INK, "labelFontSize": 11, "labelLimit": 560},
        **{
            "orient": "bottom",
            "columns": 4,
            "symbolLimit": 0,  # none is left out
            "symbolSize": 70,
            "title": None,
            "symbolStrokeWidth": 1.5,
        },
    },
    "header": {"labelColor": INK, "titleColor": INK, "labelFontSize": 12, "title": None},
}


@dataclass(frozen=True)
class Chart:
    """A chart and what a reader who cannot see it is told.

    Attributes:
        name: identifies it on the page.
        title: what it shows.
        note: how to read it: number of runs, kind of intervals.
        spec: Vega-Lite, with its data inside.
        wide: it takes a row of the page for itself.
    """

    name: str
    title: str
    note: str
    spec: Spec
    wide: bool = False

    def svg(self) -> str:
        """Draw the chart, as it is without JavaScript."""
        columns = self.spec.get("usermeta", {}).get("legend_columns", CONFIG["legend"]["columns"])
        config = CONFIG | {"legend": CONFIG["legend"] | {"columns": columns}}
        drawn = vegalite_to_svg(self.spec | {"config": config}, vl_version=VL_VERSION)
        # vl-convert counts these up from one chart to the next, and a page has one name space.
        numbers = {each: str(at) for at, each in enumerate(dict.fromkeys(CLIP.findall(drawn)))}
        drawn = ROLE.sub("", drawn)  # nameless ones: the figure around the chart has a name
        return CLIP.sub(lambda found: f"{self.name}-clip{numbers[found[0]]}", drawn)


def bundle() -> str:
    """Return the script that makes charts interactive, with its license.

    vl-convert makes it in two seconds, so it is kept in the user's cache.
    """
    path = cache_folder() / f"vega-{version('vl-convert-python')}-{VL_VERSION}.js"
    if not path.exists():
        made = javascript_bundle(vl_version=VL_VERSION)  # pyright: ignore[reportCallIssue]
        write_atomically(path, lambda temporary: temporary.write_text(made, encoding="utf-8"))
    return f"/*\n{LICENSE.read_text()}*/\n{path.read_text(encoding='utf-8')}"


def series_scales(labels: Mapping[str, str], looks: Mapping[str, Look]) -> Spec:
    """Return the encodings that tell series apart, as figures do: colour, line and marker.

    Args:
        labels: text of the legend by series.
    """
    names = list(labels.values())
    of_series = [looks[name] for name in labels]
    field = {"field": "series", "type": "nominal", "sort": names}
    return {
        "color": {**field, "scale": _scale(names, [look.colour for look in of_series])},
        "shape": {**field, "scale": _scale(names, [shape(look.marker) for look in of_series])},
        "strokeDash": {
            **field,
            "scale": _scale(names, [DASHES[look.line] for look in of_series]),
        },
    }


def legend_columns(labels: Iterable[str], wide: bool) -> int:
    """Return how many of a legend's entries fit beside each other."""
    longest = max(map(len, labels), default=0)
    return max(1, min(4, (2 if wide else 1) * COLUMN // (6 * longest + 40)))


def _scale(domain: Sequence[str], values: Sequence[Any]) -> Spec:
    return {"domain": [*domain], "range": [*values]}


@cache
def shape(marker: str) -> str:
    """Return a matplotlib marker as a shape of Vega: a name, or an SVG path within ±1."""
    named = {"o": "circle", "s": "square", "D": "diamond", "^": "triangle-up", "P": "cross"}
    named |= {"v": "triangle-down", "<": "triangle-left", ">": "triangle-right"}
    if marker in named:
        return named[marker]
    paths = {
        "x": "M-1,-1L1,1M-1,1L1,-1",
        "+": "M-1,0L1,0M0,-1L0,1",
        "X": "M-1,-.5L-.5,-1L0,-.5L.5,-1L1,-.5L.5,0L1,.5L.5,1L0,.5L-.5,1L-1,.5L-.5,0Z",
        "*": _path(*(1.0, 0.4) * 5),
        "d": "M0,-1L0.6,0L0,1L-0.6,0Z",
        "p": _path(*(1.0,) * 5),
        "h": _path(*(1.0,) * 6),
        "H": _path(*(1.0,) * 6, turn=1 / 12),
        "8": _path(*(1.0,) * 8, turn=1 / 16),
    }
    return paths[marker]


def _path(*radii: float, turn: float = 0.0) -> str:
    """Draw a polygon by the distances of its corners, the first at the top and turned a little."""
    angles = [2 * math.pi * (corner / len(radii) + turn) for corner in range(len(radii))]
    corners = [
        f"{r * math.sin(angle):.3f},{-r * math.cos(angle):.3f}"
        for r, angle in zip(radii, angles, strict=True)
    ]
    return f"M{'L'.join(corners)}Z"
