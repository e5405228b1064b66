"""Figure: the fastest strategy by model, batch and links."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from lab.analysis.figures.sheet import finish
from lab.analysis.places import (
    REFERENCE,
    Lead,
    Row,
    Where,
    columns_of,
    on_most_ranks,
    places_of,
    rows_of,
)
from lab.analysis.sheet import NothingToDraw, Sheet
from lab.draw.looks import Look, looks_of
from lab.draw.style import GREY, canvas
from lab.measure.intervals import ENOUGH_REPEATS, Interval

TOLD_APART, PALE = 0.5, 0.12  # share of a look's colour in a cell; the rest is white
CELL_IN, ROW_IN = (1.15, 0.62)  # inches of a cell on a screen
MOST_NAMED, FITTING = 2, 24  # others named in a cell, and its characters; of more, the number
NOTE = (
    f"×: step of {REFERENCE} over the fastest one's, and its 95 % interval; ≈: not shown to be "
    "slower than the fastest; +3: three more"
)


def map_of_strategies(sheet: Sheet) -> Figure:
    """Draw which fixed strategy was the fastest, at the study's largest number of ranks.

    Raises:
        NothingToDraw: strategies were not compared over several links, or models or batches.
    """
    places = on_most_ranks(places_of(sheet.study.cells))
    if len(places) < 2:
        raise NothingToDraw("strategies were compared at fewer than two places")
    leads = {place.where: place.lead(sheet.floor) for place in places}
    rows, columns = rows_of(leads), columns_of(leads)
    looks = looks_of(lead.name for lead in leads.values())
    size = CELL_IN * len(columns) + 1.6, ROW_IN * len(rows) + 1.6
    figure, axes = canvas(1, 1, size[0] + 2.0, size[1], sheet.page)
    draw_leads(axes[0][0], leads, rows, columns, looks)
    counts = sorted({len(place.steps_s[leads[place.where].name]) for place in places})
    title = f"Fastest strategy on {places[0].where.world_size} ranks"
    return finish(figure, sheet, title, handles_of(looks), sample_of(counts), NOTE)


def draw_leads(
    panel: Axes,
    leads: Mapping[Where, Lead],
    rows: list[Row],
    columns: list[str],
    looks: Mapping[str, Look],
    marked: Collection[Where] = (),
) -> None:
    """Draw a cell for each place, with the fastest strategy's name and look.

    Args:
        marked: places that get a black frame.
    """
    for where, lead in leads.items():
        x, y = columns.index(where.links), rows.index((where.model, where.batch_size))
        _cell(panel, x, y, lead, looks[lead.name], where in marked)
    panel.set_xlim(-0.5, len(columns) - 0.5)
    panel.set_ylim(len(rows) - 0.5, -0.5)
    panel.set_xticks(range(len(columns)), [_links_text(links) for links in columns])
    panel.set_yticks(range(len(rows)), [f"{model}\nbatch {batch}" for model, batch in rows])
    panel.tick_params(length=0)
    panel.spines[:].set_visible(False)
    panel.set_xlabel("links")


def handles_of(looks: Mapping[str, Look], frame: str = "") -> list[Artist]:
    """Make the legend: strategies, what shades mean, and what a black frame means."""
    handles = [
        Patch(facecolor=_shade(look, TOLD_APART), edgecolor=look.colour, ls=look.line, label=name)
        for name, look in looks.items()
    ]
    handles.append(Patch(facecolor=_grey(TOLD_APART), label="shown to be the fastest"))
    handles.append(Patch(facecolor=_grey(PALE), label="not told apart from ≈"))
    if frame:
        handles.append(Patch(facecolor="white", edgecolor="black", linewidth=2, label=frame))
    return [*handles]


def sample_of(counts: list[int]) -> str:
    """Describe how many repeats, or turns, are behind the cells of a map."""
    text = f"n = {counts[0]}" if len(counts) == 1 else f"n = {counts[0]} to {counts[-1]}"
    few = f"; fewer than {ENOUGH_REPEATS} tell nothing apart" if counts[0] < ENOUGH_REPEATS else ""
    return f"{text} repeats or turns{few}"


def _cell(panel: Axes, x: int, y: int, lead: Lead, look: Look, marked: bool) -> None:
    face = _shade(look, PALE if lead.others else TOLD_APART)
    edge, line, width = ("black", "-", 2.0) if marked else (look.colour, look.line, 1.2)
    box = Rectangle((x - 0.46, y - 0.44), 0.92, 0.88, facecolor=face, edgecolor=edge)
    box.set(linestyle=line, linewidth=width)
    panel.add_patch(box)
    lines = [factor_text(lead), _others_text(lead.others)]
    text = "\n".join(filter(None, lines))
    centre = {"ha": "center", "fontsize": 6.5, "linespacing": 1.25}
    panel.text(x, y - 0.1, lead.name.replace(" ", "\n"), va="bottom", weight="bold", **centre)
    panel.text(x, y - 0.06, text, va="top", **centre)


def factor_text(lead: Lead) -> str:
    """Write by how much a lead is faster than REFERENCE; empty if it is that itself."""
    factor = lead.factor
    if lead.name == REFERENCE or math.isnan(factor.mid):
        return ""
    return f"× {interval_text(factor)}"


def interval_text(value: Interval) -> str:
    """Write a ratio, with its interval if it has one."""
    if math.isnan(value.lo):
        return f"{value.mid:.2f}"
    return f"{value.mid:.2f} [{value.lo:.2f}, {value.hi:.2f}]"


def _others_text(others: tuple[str, ...]) -> str:
    names = [name.split(" ")[0] for name in others]

    def text(most: int) -> str:
        more = f" +{len(names) - most}" if len(names) > most else ""
        return f"≈ {', '.join(names[:most])}{more}"

    if not names:
        return ""
    return text(MOST_NAMED) if len(text(MOST_NAMED)) <= FITTING else text(1)


def _shade(look: Look, share: float) -> str:
    red, green, blue = (1 - share * (1 - part) for part in to_rgb(look.colour))
    return to_hex((red, green, blue))


def _grey(share: float) -> str:
    return _shade(Look(GREY, "-", ""), share)


def _links_text(links: str) -> str:
    return links.replace("cluster.", "").replace("rate=", "").replace(" ", "\n") or "all alike"
