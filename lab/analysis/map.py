"""The map of strategies: the fastest one by model, batch and links."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import altair as alt
import pandas as pd

from lab.analysis.charts import NothingToDraw
from lab.analysis.places import (
    REFERENCE,
    Lead,
    Where,
    columns_of,
    on_most_ranks,
    places_of,
    rows_of,
)
from lab.analysis.records import Cell
from lab.draw.chart import INK, LABEL_PX, LETTER, PALE_INK, WIDTH, Chart
from lab.draw.looks import looks_of
from lab.measure.intervals import ENOUGH_REPEATS, Interval

CELL, ROW, LEAST = 140, 58, 480  # pixels of a place, and of all that are side by side
TOLD_APART, PALE = 0.5, 0.12  # share of a look's colour in a place; the rest is white
MOST_NAMED, FITTING = 2, 24  # others named in a place, and its characters; of more, the number
NOTE = (
    f"×: step of {REFERENCE} over the fastest one's, and its 95 % interval; ≈ and pale: not shown "
    "to be slower than the fastest; +3: three more"
)
WORDS = "split(replace(datum.label, regexp('cluster[.]|rate=', 'g'), ''), ' ')"  # a line for each


def map_of_strategies(cells: Iterable[Cell], floor: float, width: int = WIDTH) -> Chart:
    """Chart which fixed strategy was the fastest, at a study's largest number of ranks.

    Raises:
        NothingToDraw: strategies were not compared over several links, or models or batches.
    """
    places = on_most_ranks(places_of(cells))
    if len(places) < 2:
        raise NothingToDraw("strategies were compared at fewer than two places")
    leads = {place.where: place.lead(floor) for place in places}
    counts = Counter(lead.name for lead in leads.values())
    (name, most), ranks = counts.most_common(1)[0], places[0].where.world_size
    message = f"On {ranks} ranks, {name} is fastest at {most} of {len(places)} places"
    sample = sample_of(len(place.steps_s[leads[place.where].name]) for place in places)
    body, _ = map_of({"": leads}, width=width)
    return Chart("map_of_strategies", message, [f"{NOTE}.", f"{sample}."], body, width)


def map_of(
    maps: Mapping[str, Mapping[Where, Lead]],
    marked: Collection[tuple[str, Where]] = (),
    width: int = 0,
) -> tuple[Any, int]:
    """Draw a place for each model, batch and links, in the colour of its fastest strategy.

    Args:
        maps: leads by the title of their panel; "" of one alone.
        marked: panels and places that get a black frame.
        width: pixels of the whole, if that is more than places need.

    Returns:
        A chart of Altair with its data, and its width in pixels.
    """
    places = [where for leads in maps.values() for where in leads]
    links = columns_of(places)
    rows = [f"{model}|batch {batch}" for model, batch in rows_of(places)]
    data = pd.DataFrame(
        {
            **{"panel": panel, "links": where.links or "all alike", "fastest": lead.name},
            "row": f"{where.model}|batch {where.batch_size}",
            **{"factor": _factor_text(lead), "others": _others_text(lead.others)},
            **{"pale": bool(lead.others), "marked": (panel, where) in marked},
        }
        for panel, leads in maps.items()
        for where, lead in leads.items()
    )
    looks = looks_of(data["fastest"])
    colours = alt.Scale(domain=[*looks], range=[look.colour for look in looks.values()])
    axis = alt.Axis(labelAngle=0, labelExpr=WORDS, labelOverlap=False, ticks=False, domain=False)
    across = alt.X("links:N", sort=[each or "all alike" for each in links], title=None, axis=axis)
    beside = alt.Axis(labelExpr="split(datum.label, '|')", ticks=False, domain=False)
    down = alt.Y("row:N", sort=rows, title=None, axis=beside)
    base = alt.Chart().encode(across, down)
    fill = alt.Color("fastest:N", scale=colours, legend=None)
    share = alt.condition("datum.pale", alt.value(PALE), alt.value(TOLD_APART))
    frame = base.mark_rect(filled=False, stroke=INK, strokeWidth=2.5)
    panel = alt.layer(
        base.mark_rect(stroke="white", strokeWidth=3).encode(
            fill, fillOpacity=share, tooltip=["row", "links", "fastest", "factor", "others"]
        ),
        frame.transform_filter("datum.marked"),
        _text(base, "fastest", dy=-14, fontWeight="bold"),
        _text(base, "factor", dy=2, color=INK),
        _text(base, "others", dy=17, color=PALE_INK),
    )
    beside = 20 + LETTER * LABEL_PX * max(len(line) for row in rows for line in row.split("|"))
    width = max(CELL * len(links), int(width - beside) if width else LEAST)
    panel = panel.properties(width=width, height=ROW * len(rows))
    if len(maps) == 1:
        return panel.properties(data=data), width
    facet: Any = alt.Facet(
        "panel:N", title=None, sort=[*maps], header=alt.Header(labelAnchor="start")
    )
    return panel.properties(data=data).facet(facet=facet, columns=1, spacing=10), width


def sample_of(counts: Iterable[int]) -> str:
    """Describe how many repeats, or turns, are behind the places of a map."""
    known = sorted(set(counts))
    text = f"n = {known[0]}" if len(known) == 1 else f"n = {known[0]} to {known[-1]}"
    few = f"; fewer than {ENOUGH_REPEATS} tell nothing apart" if known[0] < ENOUGH_REPEATS else ""
    return f"{text} repeats or turns{few}"


def interval_text(value: Interval) -> str:
    """Write a ratio, with its interval if it has one."""
    if math.isnan(value.lo):
        return f"{value.mid:.2f}"
    return f"{value.mid:.2f} [{value.lo:.2f}, {value.hi:.2f}]"


def _text(base: Any, column: str, **look: Any) -> Any:
    return base.mark_text(fontSize=LABEL_PX, **look).encode(alt.Text(f"{column}:N"))


def _factor_text(lead: Lead) -> str:
    """Write by how much a lead is faster than REFERENCE; empty if it is that itself."""
    if lead.name == REFERENCE or math.isnan(lead.factor.mid):
        return ""
    return f"× {interval_text(lead.factor)}"


def _others_text(others: tuple[str, ...]) -> str:
    names = [name.split(" ")[0] for name in others]

    def text(most: int) -> str:
        more = f" +{len(names) - most}" if len(names) > most else ""
        return f"≈ {', '.join(names[:most])}{more}"

    if not names:
        return ""
    return text(MOST_NAMED) if len(text(MOST_NAMED)) <= FITTING else text(1)
