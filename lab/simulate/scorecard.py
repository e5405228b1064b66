"""Scores of a study as tables, a page and a figure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from lab.analysis.noise import noise_floor
from lab.analysis.places import Place, places_of
from lab.analysis.points import points_of
from lab.analysis.records import commits_of, load_study
from lab.draw import style
from lab.draw.looks import Look, looks_of, order
from lab.draw.save import save
from lab.draw.text import markdown
from lab.model.profile import Profile
from lab.record.files import write_json
from lab.settings.whole import write_atomically
from lab.simulate.fit import Group
from lab.simulate.observe import fitted_groups
from lab.simulate.presets import parse
from lab.simulate.score import ScoredCell, held_out, score, scored_cells
from lab.simulate.view import fitted_values

COLUMNS = (
    *("cells", "step: median", "worst", "exposed exchange: median", "worst", "cells scored"),
    "overlapped steps, on average",
)


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
    floor: float

    @property
    def least_exposed(self) -> float:
        """Share of a step below which exposed exchange is not scored."""
        return 0.0 if math.isnan(self.floor) else self.floor


def of_study(folder: Path, profile: Mapping[str, Any], hardware: Mapping[str, Any]) -> Scorecard:
    """Fit hardware to a study's cells of one and two ranks, and score all its cells.

    Args:
        profile, hardware: contents of files of conf.

    Raises:
        ValueError: the study cannot be read or fitted.
    """
    groups = fitted_groups(folder, Profile.parse(profile), parse(hardware))
    study = load_study(folder)
    cells = tuple(cell for group in groups for cell in scored_cells(group))
    floor = noise_floor(points_of(study.cells))
    places = tuple(places_of(study.cells))
    return Scorecard(study.name, places, commits_of(study.cells), groups, cells, floor)


def summary(card: Scorecard) -> list[str]:
    """Write the fit, and the scores by conditions and by strategy, of cells with an exchange."""
    cells = held_out(card.cells)
    fits = [
        f"fitted{_at(group.conditions)} to cells of 1 and 2 ranks: {fitted_values(group.hardware)}"
        for group in card.groups
        if group.fitted
    ]
    by_links = [
        [
            group.conditions or "all",
            *_score(card, [c for c in cells if c.conditions == group.conditions]),
        ]
        for group in card.groups
    ]
    names = sorted({cell.strategy for cell in cells}, key=order)
    by_name = [[name, *_score(card, [c for c in cells if c.strategy == name])] for name in names]
    return [
        *fits,
        _what_is_scored(card, cells),
        "",
        *markdown(["held out, by links", *COLUMNS], [*by_links, ["**all**", *_score(card, cells)]]),
        "",
        *markdown(["held out, by strategy", *COLUMNS], by_name),
    ]


def _what_is_scored(card: Scorecard, cells: Sequence[ScoredCell]) -> str:
    if not _exposed(card, cells):
        return (
            "exposed exchange is not scored: no cell of none on as many ranks, or none above noise"
        )
    return (
        f"exposed exchange is scored where it takes more than {100 * card.least_exposed:.1f} % of "
        "the step, the study's noise floor"
    )


def _exposed(card: Scorecard, cells: Sequence[ScoredCell]) -> list[ScoredCell]:
    """Return the cells whose exposed exchange is known and no noise."""
    return [c for c in cells if c.exposed_s[0] > card.least_exposed * median(c.measured_s)]


def write(card: Scorecard, path: Path, command: str, sections: Sequence[str] = ()) -> None:
    """Write the page with every cell; next to it its figure, and its data as JSON.

    Args:
        sections: further lines, before the table of all cells.

    Raises:
        OSError: a file cannot be written.
    """
    picture = path.with_suffix(".png")
    save(partial(figure, card), picture)
    write_json(path.with_suffix(".json"), {"command": command, **data(card)})
    title = f"# Predictions scored on study {card.study}"
    if card.commits:
        measured = f" Measured at commit {', '.join(card.commits)}."
    else:
        title, measured = f"{title} (measured at no known commit, perhaps older than the code)", ""
    lines = [title, "", f"Generated by `{command}`.{measured}", "", *summary(card), ""]
    lines += [f"![predicted and measured]({picture.name})", "", *sections]
    lines += ["## Every cell", "", *_cells(card.cells)]
    text = "\n".join(lines) + "\n"
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


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
    return {"study": card.study, "noise_floor": card.floor, "hardware": hardware, "cells": cells}


def figure(card: Scorecard) -> Figure:
    """Draw predicted over measured exposed exchange, a panel for each conditions.

    Where no exposed exchange is scored, it is the step.
    """
    cells = held_out(card.cells)
    exposed = _exposed(card, cells)
    what = "exposed exchange" if exposed else "step"
    shown = exposed or cells
    groups = [group for group in card.groups if _of(shown, group)]
    looks = looks_of(sorted({cell.strategy for cell in shown}, key=order))
    width = max(7.0, 3.0 * len(groups) + 1.5)
    drawn, axes = style.canvas(1, len(groups), width, 4.2, sharex=True, sharey=True)
    for panel, group in zip(axes[0], groups, strict=True):
        points = [
            (looks[c.strategy], c.exposed_s if exposed else (median(c.measured_s), c.predicted_s))
            for c in _of(shown, group)
        ]
        _panel(panel, points)
        panel.set_title(_title(group) or card.study, fontsize=9)
    axes[0][0].set_ylabel(f"predicted {what}, ms")
    handles: list[Artist] = [
        Line2D([], [], color=look.colour, marker=look.marker, linestyle="", label=name)
        for name, look in looks.items()
    ]
    note = "held-out cells; the line: as measured; the band: ± 30 %"
    return style.frame(drawn, f"{what.capitalize()}, predicted and measured", handles, [note])


def _panel(panel: Axes, points: Sequence[tuple[Look, tuple[float, float]]]) -> None:
    """Draw pairs of measured and predicted seconds, on a line where they agree."""
    ends = [1e3 * seconds for _, pair in points for seconds in pair if seconds > 0]
    line = [min(ends) / 1.5, max(ends) * 1.5]
    panel.fill_between(line, [0.7 * x for x in line], [1.3 * x for x in line], color="0.9")
    panel.plot(line, line, color=style.GREY, linewidth=1)
    for look, pair in points:
        x, y = (1e3 * seconds for seconds in pair)
        panel.plot([x], [y], color=look.colour, marker=look.marker, linestyle="", markersize=5)
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_xlabel("measured, ms")
    panel.grid(linewidth=0.4)


def _title(group: Group) -> str:
    """Write a line for each setting of a group's links."""
    lines = group.conditions.split(" cluster.")
    return "\n".join(line.removeprefix("cluster.").replace("'", "") for line in lines)


def _of(cells: Sequence[ScoredCell], group: Group) -> list[ScoredCell]:
    return [cell for cell in cells if cell.conditions == group.conditions]


def _score(card: Scorecard, cells: Sequence[ScoredCell]) -> list[str]:
    found = asdict(score(cells, card.least_exposed))
    ends = (*found["step"], *found["exposed"])
    return [
        str(found["num_cells"]),
        *map(_percent, ends),
        str(found["num_exposed"]),
        _percent(found["signed_error"], "+"),
    ]


def _cells(cells: Sequence[ScoredCell]) -> list[str]:
    header = ["links", "strategy", "N", "batch", "measured ms", "predicted ms", "error"]
    header += ["exposed ms", "predicted", "error", "cell"]
    ordered = sorted(
        cells, key=lambda c: (c.conditions, c.batch_size, c.world_size, order(c.strategy))
    )
    return markdown(header, [_cell(cell) for cell in ordered])


def _cell(cell: ScoredCell) -> list[str]:
    measured, predicted = cell.exposed_s
    return [
        *(cell.conditions, cell.strategy, str(cell.world_size), str(cell.batch_size)),
        *(f"{1e3 * median(cell.measured_s):.1f}", f"{1e3 * cell.predicted_s:.1f}"),
        _percent(cell.error, "+"),
        *(_ms(measured), _ms(predicted), _percent(cell.exposed_error, "+"), cell.evidence),
    ]


def _ms(seconds: float) -> str:
    return "–" if math.isnan(seconds) else f"{1e3 * seconds:.1f}"


def _percent(error: float, sign: str = "") -> str:
    return "–" if math.isnan(error) else f"{100 * error:{sign}.1f} %"


def _at(conditions: str) -> str:
    return f" at {conditions}" if conditions else ""
