"""Scores of a study as tables, a page and a figure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd

from lab.analysis.charts import NothingToDraw
from lab.analysis.places import MapPlace, Place, columns_of, places_of
from lab.analysis.points import noise_floor, points_of
from lab.analysis.records import commits_of, load_study
from lab.draw.chart import GREY, GRID, WIDTH, Chart, LineStyle, alt, looks_of, order
from lab.draw.plots import (
    ALONE,
    GAP,
    MOST_COLUMNS,
    PANEL,
    Axis,
    in_rows,
    legend_columns,
    lines,
    round_values,
)
from lab.draw.text import in_words, markdown
from lab.model.profile import Profile
from lab.settings.storage import write_json, write_text
from lab.simulate.fit import fitted_groups
from lab.simulate.hardware import parse
from lab.simulate.score import (
    LARGEST_FITTED,
    NONE,
    Group,
    Observation,
    ScoredCell,
    held_out,
    score,
    scored_cell,
    with_exposed,
)
from lab.simulate.step import predict
from lab.simulate.terms import learned
from lab.simulate.view import at, values_of

COLUMNS = (
    *("cells", "step: median error", "worst", "exposed exchange: median error", "worst"),
    *("cells scored", "mean signed error, overlapped steps"),
)
CELLS = (
    "A cell is one strategy with one model, number of ranks, batch size and set of links. A cell "
    "is held out if nothing was fitted to it."
)
EXPOSED = "* The exposed exchange is the time by which the exchange makes a step longer. It is "

BEYOND = (2, 4, 8)  # times the most ranks that were measured
BAND = 0.3  # relative error up to which a prediction lies in the figure's band
SHAPES: dict[LineStyle, str] = {"-": "circle", "--": "square", ":": "triangle", "-.": "diamond"}


@dataclass(frozen=True)
class Scorecard:
    """The scored cells of a study.

    Attributes:
        places: where its strategies were compared.
        commits: the lab's commits that measured the cells, of unchanged files; empty if one is
            not known.
        floor: the study's noise floor; NaN if unknown.
    """

    study: str
    places: tuple[Place, ...]
    commits: tuple[str, ...]
    groups: tuple[Group, ...]
    cells: tuple[ScoredCell, ...]
    noise_floor: float

    @property
    def least_exposed(self) -> float:
        """Share of a step below which exposed exchange is not scored."""
        return 0.0 if math.isnan(self.noise_floor) else self.noise_floor


def of_study(folder: Path, profile: Mapping[str, Any], hardware: Mapping[str, Any]) -> Scorecard:
    """Fit hardware to a study's cells of one and two ranks, and score all its cells.

    Args:
        profile, hardware: contents of files of conf.

    Raises:
        ValueError: the study cannot be read or fitted.
    """
    groups = fitted_groups(folder, Profile.parse(profile), learned(parse(hardware)))
    study = load_study(folder)
    cells = tuple(scored_cell(group, one) for group in groups for one in group.observations)
    floor = noise_floor(points_of(study.cells))
    places = tuple(places_of(study.cells))
    return Scorecard(study.name, places, commits_of(study.cells), groups, cells, floor)


def summary(card: Scorecard) -> list[str]:
    """Write the fit, and the scores by conditions and by strategy, of cells with an exchange."""
    cells = held_out(card.cells)
    fits = [
        "* The hardware parameters are fitted to the cells on 1 and 2 ranks"
        f"{at(group.conditions)}. The fitted values are {values_of(asdict(group.hardware))}."
        for group in card.groups
        if group.fitted
    ]
    links = [group.conditions for group in card.groups]
    by_links = [
        [each or "all", *_score(card, [c for c in cells if c.conditions == each])] for each in links
    ]
    names = sorted({cell.strategy for cell in cells}, key=order)
    by_name = [[name, *_score(card, [c for c in cells if c.strategy == name])] for name in names]
    if with_exposed(cells, card.least_exposed):
        scored = (
            f"{EXPOSED}scored only in cells where it exceeds the study's noise floor, "
            f"{100 * card.noise_floor:.1f} % of the step time."
            if card.least_exposed
            else f"{EXPOSED}scored wherever it is above zero, because the study's noise floor is "
            "unknown."
        )
    else:
        scored = f"{EXPOSED}not scored, because the study has no cell with `strategy=none` on the "
        scored += "same number of ranks, or because no exposed exchange exceeds the noise floor."
    whole = score(cells, card.least_exposed)
    null = (
        [] if math.isnan(whole.skill) else [f"* For the held-out cells, {whole.linear_in_words()}"]
    )
    by_links.append(["**all**", *_score(card, cells)])
    return [
        *(*fits, scored, *null, ""),
        *markdown(["held-out cells, by links", *COLUMNS], by_links),
        "",
        *markdown(["held-out cells, by strategy", *COLUMNS], by_name),
    ]


def write(card: Scorecard, path: Path, command: str, sections: Sequence[str] = ()) -> None:
    """Write the page with every cell; next to it its figure, and its data as JSON.

    Args:
        sections: further lines, before the table of all cells.

    Raises:
        OSError: a file cannot be written.
    """
    picture = path.with_suffix(".png")
    chart(card).write(path.with_suffix(""), ["png"])
    write_json(path.with_suffix(".json"), {"command": command, **data(card)})
    measured = "The commit at which the cells were measured is unknown."
    if card.commits:
        many = "s" if len(card.commits) > 1 else ""
        measured = f"The cells were measured at commit{many} {in_words(card.commits)}."
    head = f"This page is generated by `{command}`. {measured} {CELLS}"
    lines = [f"# Predictions scored on study {card.study}", "", head, "", *summary(card), ""]
    lines += [f"![predicted and measured]({picture.name})", "", *sections]
    lines += ["## Every cell", "", *markdown(*rows_of(card.cells))]
    text = "\n".join(lines) + "\n"
    write_text(path, text)


def data(card: Scorecard) -> dict[str, Any]:
    """Collect what was measured, and the hardware on which it was predicted."""
    cells = [
        {
            "conditions": group.conditions,
            "strategy": cell.name,
            "profile": cell.profile.name,
            "bytes_scale": cell.profile.bytes_scale,
            "world_size": cell.world_size,
            "per_rank_batch_size": cell.per_rank_batch_size,
            "steps_s": cell.steps_s,
        }
        for group in card.groups
        for cell in group.observations
    ]
    hardware = [
        {"conditions": g.conditions, "fitted": g.fitted, **asdict(g.hardware)} for g in card.groups
    ]
    return {
        "study": card.study,
        "noise_floor": card.noise_floor,
        "hardware": hardware,
        "cells": cells,
    }


def chart(card: Scorecard) -> Chart:
    """Chart predicted over measured exposed exchange, a panel for each conditions.

    Where no exposed exchange is scored, it is the step.
    """
    cells = held_out(card.cells)
    exposed = with_exposed(cells, card.least_exposed)
    data: Any = pd.DataFrame(
        {
            **{"series": cell.strategy, "ranks": cell.world_size, "batch": cell.batch_size},
            "links": _short(cell.conditions) or card.study,
            "measured": 1e3 * (cell.exposed_s[0] if exposed else median(cell.measured_s)),
            "predicted": 1e3 * (cell.exposed_s[1] if exposed else cell.predicted_s),
        }
        for cell in exposed or cells
    )
    what = "exposed exchange" if exposed else "step"
    places = columns_of(MapPlace("", cell.conditions, 1, 1) for cell in exposed or cells)
    panels = [_short(links) or card.study for links in places]
    columns = min(len(panels), MOST_COLUMNS)
    side = PANEL if columns > 1 else ALONE
    body = in_rows(_panel(data, what, side), "links", panels, columns)
    near = int(((data["predicted"] / data["measured"] - 1).abs() <= BAND).sum())
    message = (
        f"{what.capitalize()}: {near} of {len(data)} predictions are within {100 * BAND:.0f} % of "
        "what was measured"
    )
    about = (
        f"held-out cells of {card.study}; line: prediction and measurement are equal; band: "
        f"± {100 * BAND:.0f} %"
    )
    return Chart("scores", message, [about], body, columns * (side + GAP))


def beyond(card: Scorecard, width: int = WIDTH) -> Chart:
    """Chart speedup at the largest batch: measured, and predicted on more ranks than were measured.

    Each of these ranks has a machine of its own, also if those measured shared one's cores.

    Raises:
        NothingToDraw: no cell on several ranks was measured.
    """
    group = max(card.groups, key=lambda each: len(each.observations))
    largest = max(one.batch_size for one in group.observations)
    cells = [one for one in group.observations if one.batch_size == largest]
    (profile, _), *_ = Counter(one.profile for one in cells).most_common()
    cells = [one for one in cells if one.profile == profile]
    alone = [one.step_s for one in cells if one.world_size == 1]
    measured = max(one.world_size for one in cells)
    if not alone or measured == 1:
        raise NothingToDraw(
            "predictions for more ranks: they need measured cells on one rank and on several"
        )
    more = [measured * factor for factor in BEYOND if not largest % (measured * factor)]
    rows = [row for one in cells for row in _rows(group, one, median(alone), more)]
    data: Any = pd.DataFrame(rows)
    sizes = sorted(set(data["x"]))
    last = data[(data["x"] == sizes[-1]) & (data["series"] != NONE)]
    best = last.loc[last["value"].idxmax()]
    message = (
        f"Predicted: {best['series']} is the fastest on {sizes[-1]} ranks, with "
        f"{best['value']:.3g} times the speed of one rank"
    )
    about = [
        f"Global batch {largest}, layers of {profile.name}{at(group.conditions)}. Filled: "
        "measured. Hollow: predicted, each rank on its own machine; vertical lines: the range "
        f"that the fit to cells on 1 and {LARGEST_FITTED} ranks leaves open. Dotted: ideal."
    ]
    x, y = (Axis(name, log=2, ticks=sizes) for name in ("ranks", "speedup"))
    drawn = lines(data, x, y, looks_of(data["series"]), reference="ideal", width=width)
    return Chart("beyond", message, about, *drawn)


def _rows(
    group: Group, one: Observation, alone_s: float, more: Sequence[int]
) -> list[dict[str, Any]]:
    """Return the measured speedup of a cell, and beyond the last one the predicted ones."""
    point = {"series": one.name, "low": math.nan, "high": math.nan}
    measured = alone_s / one.step_s
    rows = [point | {"x": one.world_size, "value": measured, "hollow": False}]
    for size in more if 2 * one.world_size in more else ():
        best, *others = (
            predict(one.profile, replace(each, num_cores=None), one.strategy, size, one.batch_size)
            for each in (group.hardware, *group.draws)
        )
        ends = sorted([best.speedup, *(other.speedup for other in others)])
        known = {"x": size, "value": best.speedup, "low": ends[0], "high": ends[-1]}
        rows.append(point | known | {"hollow": True})
    return [row | {"ideal": float(row["x"])} for row in rows]


def _panel(data: Any, what: str, side: int) -> Any:
    """Draw a point for each cell, on a line where predictions agree with what was measured."""
    ends: Any = pd.concat([data["measured"], data["predicted"]])
    low, high = float(ends[ends > 0].min()) / 1.5, float(ends.max()) * 1.5
    data = data.assign(drawn=data["predicted"].clip(lower=low))  # an exchange may cost nothing
    looks = looks_of(data["series"])
    scale = alt.Scale(type="log", domain=(low, high), nice=False)
    ticks = [tick for tick in round_values(low, high) if f"{tick:e}"[0] == "1" or high < 100 * low]
    axis = alt.Axis(values=ticks, format="~g", grid=False)
    x = alt.X("measured:Q", title=f"measured {what}, ms", scale=scale, axis=axis)
    y = alt.Y("drawn:Q", title="predicted, ms", scale=scale, axis=axis)
    legend = alt.Legend(columns=legend_columns(looks))
    colours = alt.Scale(domain=[*looks], range=[look.colour for look in looks.values()])
    shapes = alt.Scale(domain=[*looks], range=[SHAPES[look.line] for look in looks.values()])
    edges = {"x": [low, high], "low": [low * (1 - BAND), high * (1 - BAND)]}
    line = alt.Chart(pd.DataFrame({**edges, "high": [low * (1 + BAND), high * (1 + BAND)]}))
    line = line.encode(alt.X("x:Q", scale=scale))
    band = line.mark_area(color=GRID, clip=True)
    point = alt.Chart().mark_point(filled=True, size=50, opacity=1)
    return alt.layer(
        band.encode(alt.Y("low:Q", scale=scale), alt.Y2("high:Q")),
        line.mark_line(color=GREY, strokeWidth=1).encode(alt.Y("x:Q", scale=scale)),
        point.encode(
            *(x, y, alt.Color("series:N", scale=colours, legend=legend)),
            alt.Shape("series:N", scale=shapes, legend=legend),
            tooltip=list(data.columns),
        ),
    ).properties(width=side, height=side, data=data)


def _short(conditions: str) -> str:
    return conditions.replace("cluster.", "").replace("'", "")


def _score(card: Scorecard, cells: Sequence[ScoredCell]) -> list[str]:
    found = score(cells, card.least_exposed)
    return [
        str(found.num_cells),
        *map(_percent, (*found.step, *found.exposed)),
        str(found.num_exposed),
        _percent(found.signed_error, "+"),
    ]


def rows_of(cells: Sequence[ScoredCell]) -> tuple[list[str], list[list[str]]]:
    """Return the heads and the lines of a table of every cell."""
    header = ["links", "strategy", "profile", "N", "batch", "measured ms", "predicted ms", "error"]
    header += ["exposed ms", "predicted exposed ms", "exposed error", "cell"]
    ordered = sorted(
        cells, key=lambda c: (c.conditions, c.batch_size, c.world_size, order(c.strategy))
    )
    rows = list[list[str]]()
    for cell in ordered:
        measured, predicted = cell.exposed_s
        error = cell.exposed_error if cell.world_size > 1 else math.nan  # there is no exchange
        rows.append(
            [
                *(cell.conditions, cell.strategy, cell.profile),
                *(str(cell.world_size), str(cell.batch_size)),
                *(f"{1e3 * median(cell.measured_s):.1f}", f"{1e3 * cell.predicted_s:.1f}"),
                *(_percent(cell.error, "+"), _ms(measured), _ms(predicted)),
                *(_percent(error, "+"), cell.evidence),
            ]
        )
    return header, rows


def _ms(seconds: float) -> str:
    return "–" if math.isnan(seconds) else f"{1e3 * seconds:z.1f}"


def _percent(error: float, sign: str = "") -> str:
    return "–" if math.isnan(error) else f"{100 * error:{sign}z.1f} %"
