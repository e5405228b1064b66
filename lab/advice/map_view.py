"""The map of strategies as a section of a page, as JSON and as a figure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from lab.advice.map import Answer, Map
from lab.analysis.figures.map import (
    CELL_IN,
    NOTE,
    ROW_IN,
    draw_leads,
    handles_of,
    interval_text,
    sample_of,
)
from lab.analysis.leaders import Times
from lab.analysis.places import REFERENCE, Where, columns_of, on_most_ranks, rows_of
from lab.analysis.verdict import Summary, behind
from lab.draw import style
from lab.draw.looks import looks_of
from lab.draw.save import save
from lab.draw.text import markdown
from lab.measure.intervals import Interval, wilson
from lab.record.files import write_json

WHERE = ("model", "N", "batch", "links")
HEADER = (
    *(*WHERE, "fastest", f"{REFERENCE} / it", "not told apart", "predicted", f"{REFERENCE} / it"),
    *("regret", "auto / fastest", f"priority / {REFERENCE}", "exposed"),
)


def section(found: Map) -> list[str]:
    """Write the map as lines of Markdown; none if no place was held out."""
    if not found.answers:
        return []
    links = columns_of(one.place.where for one in found.answers)
    ordered = sorted(found.answers, key=lambda one: _place_in_table(one.place.where, links))
    return [
        "## Where each exchange pays",
        "",
        *(_summary_line(name, each) for name, each in found.summaries.items()),
        _agreement(found.answers),
        "",
        *markdown(HEADER, [_row(found, answer) for answer in ordered]),
        "",
        "Steps over that of the fastest fixed strategy (`none` and `auto` are not fixed ones):",
        "",
        *markdown([*WHERE, "the fastest first"], [_steps(answer) for answer in ordered]),
        "",
    ]


def write(found: Map, path: Path) -> list[Path]:
    """Write the map's figure and its data to `path`, with the suffixes .png and .json.

    Raises:
        OSError: a file cannot be written.
    """
    if not found.answers:
        return []
    picture, numbers = path.with_suffix(".png"), path.with_suffix(".json")
    save(partial(figure, found), picture)
    write_json(numbers, data(found))
    return [picture, numbers]


def data(found: Map) -> dict[str, Any]:
    """Collect what was measured and predicted at each place, and the summaries."""
    places = [
        {
            **asdict(answer.place.where),
            "measured": asdict(answer.measured),
            "predicted": asdict(answer.predicted),
            "is_best": answer.is_best,
            "agrees": answer.agrees,
            "regret": asdict(answer.regret),
            "steps_s": {name: _paired(times) for name, times in answer.place.steps_s.items()},
            "over_fastest": {name: asdict(each) for name, each in behind(answer.place).items()},
        }
        for answer in found.answers
    ]
    summaries = {name: asdict(each) for name, each in found.summaries.items()}
    return {"noise_floor": found.floor, "summaries": summaries, "places": places}


def _paired(times: Times) -> dict[str, float]:
    """Name what was measured side by side: a repeat, or a start of ranks and its turn."""
    return {
        " turn ".join(map(str, key)) if isinstance(key, tuple) else str(key): seconds
        for key, seconds in times.items()
    }


def figure(found: Map) -> Figure:
    """Draw the measured map above the predicted one, at the largest number of ranks.

    Places where the predicted strategy was measured to be slower than the fastest are framed.
    """
    shown = {place.where for place in on_most_ranks(one.place for one in found.answers)}
    answers = [one for one in found.answers if one.place.where in shown]
    measured = {one.place.where: one.measured for one in answers}
    predicted = {one.place.where: one.predicted for one in answers}
    wrong = {one.place.where for one in answers if not one.agrees}
    rows, columns = rows_of(shown), columns_of(shown)
    looks = looks_of(lead.name for leads in (measured, predicted) for lead in leads.values())
    width, height = CELL_IN * len(columns) + 3.6, 2 * (ROW_IN * len(rows) + 0.5) + 1.2
    drawn, axes = style.canvas(2, 1, width, height, sharex=True)
    maps = (("measured", measured, set[Where]()), ("predicted", predicted, wrong))
    for (panel,), (name, leads, marked) in zip(axes, maps, strict=True):
        draw_leads(panel, leads, rows, columns, looks, marked)
        panel.set_title(name, loc="left")
    axes[0][0].set_xlabel("")
    handles = handles_of(looks, "measured slower than the fastest" if wrong else "")
    counts = sorted({len(one.place.steps_s[one.measured.name]) for one in answers})
    title = f"Fastest strategy on {answers[0].place.where.world_size} ranks"
    note = f"measured: {sample_of(counts)}; predicted: intervals of what the fit leaves open"
    return style.frame(drawn, title, handles, [NOTE, note])


def _summary_line(name: str, found: Summary) -> str:
    other = REFERENCE if name == "priority" else "the fastest fixed strategy"
    worst = found.worst
    exposed = f"; exposed exchange {interval_text(found.exposed)} ({found.num_exposed} places)"
    return (
        f"- `{name}` over {other}: step {interval_text(found.step)} over {found.num_places} places"
        f"{exposed if found.num_exposed else ''}; more than {100 * found.limit:g} % slower in "
        f"{_percent(found.beyond)} of places; worst {interval_text(worst.step)}, "
        f"{_place_text(worst.where)}"
    )


def _agreement(answers: Sequence[Answer]) -> str:
    best, agrees = (
        Interval.read(wilson(sum(flags), len(answers)))
        for flags in ([one.is_best for one in answers], [one.agrees for one in answers])
    )
    worst = max(answers, key=lambda one: one.regret.mid)
    return (
        f"- the predicted strategy is the fastest measured one in {_percent(best)} of "
        f"{len(answers)} places, and in {_percent(agrees)} it or one not told apart from it; "
        f"largest regret {100 * (worst.regret.mid - 1):.1f} %, {_place_text(worst.place.where)}"
    )


def _row(found: Map, answer: Answer) -> list[str]:
    place, measured, predicted = answer.place, answer.measured, answer.predicted
    least = 0.0 if math.isnan(found.floor) else found.floor
    return [
        *_where(place.where),
        *(measured.name, _text(measured.factor), ", ".join(measured.others)),
        *(predicted.name, _text(predicted.factor), f"{100 * (answer.regret.mid - 1):.1f} %"),
        _text(place.ratio("auto", measured.name)),
        _text(place.ratio("priority", REFERENCE)),
        _text(place.exposed_ratio("priority", REFERENCE, least)),
    ]


def _steps(answer: Answer) -> list[str]:
    steps = [f"{name} {each.mid:.2f}" for name, each in behind(answer.place).items()]
    return [*_where(answer.place.where), ", ".join(steps)]


def _place_in_table(where: Where, links: list[str]) -> tuple[str, int, int, int]:
    return where.model, where.world_size, where.batch_size, links.index(where.links)


def _where(where: Where) -> list[str]:
    return [where.model, str(where.world_size), str(where.batch_size), where.links]


def _place_text(where: Where) -> str:
    return f"{where.model} of batch {where.batch_size} at {where.links or 'the same links'}"


def _percent(share: Interval) -> str:
    return f"{100 * share.mid:.0f} [{100 * share.lo:.0f}, {100 * share.hi:.0f}] %"


def _text(value: Interval) -> str:
    return "–" if math.isnan(value.mid) else interval_text(value)
