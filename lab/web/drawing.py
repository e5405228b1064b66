"""Charts on a page: drawn when it is written, and interactive where scripts may run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from vl_convert import javascript_bundle

from lab.codec.build import cache_folder
from lab.draw.chart import CLIP, VL_VERSION, Chart, drawn
from lab.settings.atomic import write_atomically

WIDTH = 1250  # pixels of a page's charts; a narrower page makes them smaller
DIGITS = re.compile(r"(\.\d\d)\d{3,}")  # of places in a drawing, whose labels have fewer
# Attributes that a page needs not: its figures have names, and its style says the rest.
SAID = re.compile(
    r' (?:(?:role|aria-[a-z]+|font-family|pointer-events|stroke-miterlimit)="[^"]*"'
    r'|font-size="11px"|opacity="1")'
)


@dataclass(frozen=True)
class Drawing:
    """A chart, and what a reader who cannot see it is told.

    Attributes:
        name: identifies it on the page.
        title: what it shows.
        note: how to read it: number of runs, kind of intervals.
        shared: notes that the study's other charts have too.
        spec: Vega-Lite, with its data inside.
    """

    name: str
    title: str
    note: str
    shared: Sequence[str]
    spec: dict[str, Any]

    def svg(self) -> str:
        """Draw the chart, as it is without JavaScript."""
        svg = DIGITS.sub(r"\1", SAID.sub("", drawn(self.spec, "svg").decode()))
        return CLIP.sub(lambda found: f"{self.name}-{found[0]}", svg)  # a page has one name space


def drawing(name: str, chart: Chart) -> Drawing:
    """Prepare a chart for a page, which writes its title itself."""
    spec = chart.spec(title=False)
    del spec["$schema"]  # the page's own library reads it
    spec["config"] |= {"background": None, "aria": False, "padding": 2}
    return Drawing(name, chart.message, " ".join(chart.about), chart.notes, spec)


def bundle() -> str:
    """Return the script that makes charts interactive.

    vl-convert makes it in two seconds, so it is kept in the user's cache.
    """
    path = cache_folder() / f"vega-{version('vl-convert-python')}-{VL_VERSION}.js"
    if not path.exists():
        made = javascript_bundle(vl_version=VL_VERSION)  # pyright: ignore[reportCallIssue]
        write_atomically(path, lambda temporary: temporary.write_text(made, encoding="utf-8"))
    return path.read_text(encoding="utf-8")
