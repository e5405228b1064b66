"""Advice held to a study: the first choice of each scenario, and the map of strategies.

A choice is scored by how much slower it is than the best measured cell, and beside the best
constant choice: the one strategy that would have been the best to take everywhere. The map shows
which strategy is the fastest at each place, measured, and predicted by hardware not fitted to it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lab.advice.advise import CLOSE, Forecast, constant_of, contenders, ranked, steps_on, verdict
from lab.analysis.places import (
    ADAPTIVE,
    NOTE,
    REFERENCE,
    Lead,
    MapPlace,
    Place,
    Summary,
    behind,
    columns_of,
    on_most_ranks,
    sample_of,
    summaries,
)
from lab.analysis.places import map_of as map_body
from lab.draw.chart import Chart
from lab.draw.text import markdown
from lab.measure.statistics import UNKNOWN, Interval, wilson
from lab.settings.storage import write_json
from lab.simulate.score import NONE, Group, Observation

WHERE = ("model", "N", "batch", "links")
HEADER = (
    *(*WHERE, "fastest", f"{REFERENCE} / fastest", "not significantly slower"),
    *("predicted", f"{REFERENCE} / predicted"),
    *("regret", "auto / fastest", f"priority / {REFERENCE}", "exposed"),
)


@dataclass(frozen=True)
class Choice:
    """The first choice among the strategies measured in one scenario.

    Attributes:
        conditions: as in Group.
        kind: "any" if all strategies could be chosen, "exact" if only those.
        cells: those of the scenario.
        chosen: the first choice. predicted_s: its step time.
        num_close: how many others advice cannot tell apart from its first choice.
    """

    conditions: str
    kind: str
    cells: Sequence[Observation]
    chosen: Observation
    predicted_s: float
    num_close: int

    @property
    def best(self) -> Observation:
        """The cells that were measured to be the fastest."""
        return min(self.cells, key=lambda cell: cell.step_s)

    @property
    def regret(self) -> float:
        """How much longer the choice's step takes than the best one, measured, relative."""
        return self.chosen.step_s / self.best.step_s - 1

    @property
    def regrets(self) -> dict[str, float]:
        """Regret of every strategy that was measured with one setting, by name."""
        return {cell.name: cell.step_s / self.best.step_s - 1 for cell in _single(self.cells)}


def choices(groups: Iterable[Group]) -> list[Choice]:
    """Choose in every scenario of the groups, among all strategies and among exact ones.

    A scenario has one profile, link, number of ranks and batch, and at least two strategies, none
    of whose cells was fitted.
    """
    found = []
    for group in groups:
        for cells in scenarios(group):
            exact = [cell for cell in cells if not cell.strategy.lossy]
            found += [_choose(group, "any", cells)]
            found += [_choose(group, "exact", exact)] if len(exact) > 1 else []
    return found


def report(found: Sequence[Choice]) -> list[str]:
    """Write a line for each choice, and how many are close to the best; empty without any."""
    if not found:
        return []
    header = ["links", "profile", "N", "batch", "strategies", "choice", "predicted ms"]
    header += ["measured ms", "best", "measured ms", "regret", "not significantly slower"]
    lines = [
        "- A scenario is one model with one set of links, number of ranks and batch size. In each "
        "scenario, `lab.advise` chooses a strategy. The regret of a choice is how much longer its "
        "measured step takes than the step of the fastest measured strategy."
    ]
    rows = []
    for kind, among in (("any", "all strategies"), ("exact", "exact strategies")):
        if chosen := [choice for choice in found if choice.kind == kind]:
            regrets = [choice.regret for choice in chosen]
            good = sum(regret <= CLOSE for regret in regrets)
            lines.append(
                f"- Among {among}, the first choice of the advice is within {100 * CLOSE:g} % "
                f"of the fastest strategy in {good} of {len(regrets)} scenarios. The largest "
                f"regret is {100 * max(regrets):.1f} %."
            )
            constant = constant_of(regrets, [choice.regrets for choice in chosen])
            lines.append(f"- {verdict('The first choice', constant)}")
    for one in found:
        chosen, best = one.chosen, one.best
        among = f"{len(one.cells)}{' exact' if one.kind == 'exact' else ''}"
        rows.append(
            [
                *(one.conditions, chosen.profile.name),
                *(str(chosen.world_size), str(chosen.batch_size), among),
                *(chosen.name, f"{1e3 * one.predicted_s:.1f}", f"{1e3 * chosen.step_s:.1f}"),
                *(best.name, f"{1e3 * best.step_s:.1f}"),
                *(f"{100 * one.regret:.1f} %", str(one.num_close)),
            ]
        )
    return [*lines, "", *markdown(header, rows)]


def scenarios(group: Group) -> list[list[Observation]]:
    """Divide a group's cells by profile, ranks and batch; at least two in each, all held out."""
    found: dict[str, list[Observation]] = {}
    for cell in group.observations:
        if cell.name != NONE:
            key = repr((cell.profile, cell.world_size, cell.per_rank_batch_size))
            found.setdefault(key, []).append(cell)
    return [
        cells
        for cells in found.values()
        if len(cells) > 1 and all(group.evidence(cell) == "held out" for cell in cells)
    ]


def _choose(group: Group, kind: str, cells: Sequence[Observation]) -> Choice:
    forecasts = ranked(_forecast(group, cell, str(place)) for place, cell in enumerate(cells))
    # Their names are places, as one strategy may have been measured twice.
    chosen, num_close = cells[int(forecasts[0].name)], len(contenders(forecasts))
    return Choice(group.conditions, kind, cells, chosen, forecasts[0].steps_s[0], num_close)


def _single(cells: Sequence[Observation]) -> list[Observation]:
    """Return the cells of strategies that were measured with one setting."""
    counts = Counter(cell.name for cell in cells)
    return [cell for cell in cells if counts[cell.name] == 1]


def _forecast(group: Group, cell: Observation, name: str) -> Forecast:
    """Predict a cell under a name."""
    point = cell.profile, cell.strategy, cell.world_size, cell.per_rank_batch_size
    return Forecast(name, cell.strategy.lossy, cell.batch_size, 1, steps_on(group, *point))


@dataclass(frozen=True)
class LeadAnswer:
    """The lead at a place, as measured and as predicted.

    Attributes:
        predicted: its `others` are those that advice cannot tell apart, and its `factor` has the
            interval of the draws.
    """

    place: Place
    measured: Lead
    predicted: Lead

    @property
    def is_best(self) -> bool:
        """The predicted strategy was measured fastest."""
        return self.predicted.name == self.measured.name

    @property
    def agrees(self) -> bool:
        """It was measured fastest, or could not be told apart from what was."""
        return self.is_best or self.predicted.name in self.measured.others

    @property
    def regret(self) -> Interval:
        """Its measured step over that of the fastest one."""
        return self.place.ratio(self.predicted.name, self.measured.name)


@dataclass(frozen=True)
class Map:
    """The places of a study whose cells were held out, and what follows from them.

    Attributes:
        summaries: see lab.analysis.places.
    """

    answers: tuple[LeadAnswer, ...]
    noise_floor: float
    summaries: dict[str, Summary]


def map_of(places: Sequence[Place], groups: Iterable[Group], floor: float) -> Map:
    """Predict the fastest strategy of each place by hardware that was not fitted to it.

    Args:
        places: of the study that the groups were read from.
        floor: its noise floor; NaN if unknown.
    """
    cells: dict[MapPlace, tuple[Group, list[Observation]]] = {}
    for group in groups:
        for observed in scenarios(group):
            one = observed[0]
            where = MapPlace(one.profile.name, group.conditions, one.world_size, one.batch_size)
            cells[where] = group, observed
    answers = []
    for place in places:
        group, observed = cells.get(place.where, (None, []))
        # Comparable are fixed strategies that were measured with one setting.
        comparable = [cell for cell in _single(observed) if cell.name in place.fixed()]
        if group and len(comparable) > 1:
            answers.append(LeadAnswer(place, place.lead(floor), _predicted(group, comparable)))
    return Map(tuple(answers), floor, summaries([one.place for one in answers], floor))


def _predicted(group: Group, cells: Sequence[Observation]) -> Lead:
    forecasts = ranked(_forecast(group, cell, cell.name) for cell in cells)
    first, others, factor = forecasts[0], contenders(forecasts), UNKNOWN
    for reference in forecasts:
        if reference.name == REFERENCE:
            ratios = [a / b for a, b in zip(reference.steps_s, first.steps_s, strict=True)]
            factor = Interval(min(ratios), ratios[0], max(ratios))
    return Lead(first.name, tuple(other.name for other in others), factor)


def section(found: Map) -> list[str]:
    """Write the map as lines of Markdown; none if no place was held out."""
    if not found.answers:
        return []
    links = columns_of(one.place.where for one in found.answers)

    def place_in_table(answer: LeadAnswer) -> tuple[str, int, int, int]:
        where = answer.place.where
        return where.model, where.world_size, where.batch_size, links.index(where.links)

    ordered = sorted(found.answers, key=place_in_table)
    steps = [
        [
            *_where(place.where),
            ", ".join(f"{n} {each.mid:.2f}" for n, each in behind(place).items()),
        ]
        for place in (answer.place for answer in ordered)
    ]
    return [
        "## Where each exchange pays",
        "",
        "- A case is one model with one set of links, number of ranks and batch size. All "
        "strategies except `none` and `auto` are fixed strategies. Brackets give 95 % intervals.",
        *(_summary_line(name, each) for name, each in found.summaries.items()),
        _agreement(found.answers),
        *_constant_lines(found.answers),
        "",
        *markdown(HEADER, [_map_row(found, answer) for answer in ordered]),
        "",
        "The next table gives step times relative to the step time of the fastest fixed strategy.",
        "",
        *markdown([*WHERE, "fastest first"], steps),
        "",
    ]


def write_map(found: Map, path: Path) -> list[Path]:
    """Write the map's figure and its data to `path`, with the suffixes .png and .json.

    Raises:
        OSError: a file cannot be written.
    """
    if not found.answers:
        return []
    numbers = path.with_suffix(".json")
    write_json(numbers, data_of(found))
    return [*map_chart(found).write(path.with_suffix(""), ["png"]), numbers]


def data_of(found: Map) -> dict[str, Any]:
    """Collect what was measured and predicted at each place, and the summaries."""
    places = [
        {
            **asdict(answer.place.where),
            "measured": asdict(answer.measured),
            "predicted": asdict(answer.predicted),
            "is_best": answer.is_best,
            "agrees": answer.agrees,
            "regret": asdict(answer.regret),
            "steps_s": {
                name: {_name(key): seconds for key, seconds in times.items()}
                for name, times in answer.place.steps_s.items()
            },
            "over_fastest": {name: asdict(each) for name, each in behind(answer.place).items()},
        }
        for answer in found.answers
    ]
    summaries = {name: asdict(each) for name, each in found.summaries.items()}
    return {"noise_floor": found.noise_floor, "summaries": summaries, "places": places}


def _name(key: Hashable) -> str:
    """Name what was measured side by side: a repeat, or a start of ranks and its turn."""
    return " turn ".join(map(str, key)) if isinstance(key, tuple) else str(key)


def map_chart(found: Map) -> Chart:
    """Chart the measured map above the predicted one, at the largest number of ranks.

    Places where the predicted strategy was measured to be slower than the fastest are framed.
    """
    shown = {place.where for place in on_most_ranks(one.place for one in found.answers)}
    answers = [one for one in found.answers if one.place.where in shown]
    wrong = [one for one in answers if not one.agrees]
    body, width = map_body(
        {
            "measured": {one.place.where: one.measured for one in answers},
            "predicted": {one.place.where: one.predicted for one in answers},
        },
        {("predicted", one.place.where) for one in wrong},
    )
    ranks = answers[0].place.where.world_size
    num_best = sum(one.is_best for one in answers)
    undecided = len(answers) - num_best - len(wrong)
    message = (
        f"On {ranks} ranks, the predicted strategy was measured to be the fastest in {num_best} of "
        f"{len(answers)} cases"
    )
    if undecided:
        message += f", and not significantly slower in {undecided} more"
    sample = sample_of(len(one.place.steps_s[one.measured.name]) for one in answers)
    about = ["the fastest fixed strategy by model, batch and links", NOTE]
    about += [f"measured: {sample}; predicted: intervals over the uncertainty of the fit"]
    about += (
        ["black frame: the predicted strategy was measured to be slower than the fastest"]
        if wrong
        else []
    )
    return Chart("map", message, about, body, width)


def _summary_line(name: str, found: Summary) -> str:
    other = f"`{REFERENCE}`" if name == "priority" else "the fastest fixed strategy"
    worst = found.worst
    exposed = (
        f" The exposed exchange takes {found.exposed:.2f} times as long "
        f"({found.num_exposed} cases)."
    )
    return (
        f"- Compared with {other}, a step with `{name}` takes {found.step:.2f} times as "
        f"long ({found.num_places} cases).{exposed if found.num_exposed else ''} In "
        f"{_percent(found.beyond)} of the cases, `{name}` is more than {100 * found.limit:g} % "
        f"slower than {other}. The largest ratio of step times is {worst.step:.2f}, "
        f"for {_place_text(worst.where)}."
    )


def _agreement(answers: Sequence[LeadAnswer]) -> str:
    best, agrees = (
        Interval.read(wilson(sum(flags), len(answers)))
        for flags in ([one.is_best for one in answers], [one.agrees for one in answers])
    )
    worst = max(answers, key=lambda one: one.regret.mid)
    return (
        f"- In {_percent(best)} of the {len(answers)} cases, the strategy that was predicted to be "
        f"the fastest was also measured to be the fastest. In {_percent(agrees)} of the cases, it "
        "was the fastest or not significantly slower than the fastest. The largest regret of the "
        f"predicted strategy is {100 * (worst.regret.mid - 1):.1f} %, for "
        f"{_place_text(worst.place.where)}."
    )


def _constant_lines(answers: Sequence[LeadAnswer]) -> list[str]:
    """Hold the predicted strategies, and those that choose as they run, to constant choices."""
    regrets = [
        {name: each.mid - 1 for name, each in behind(answer.place).items()} for answer in answers
    ]
    fixed = [
        {name: row[name] for name in answer.place.fixed()}
        for answer, row in zip(answers, regrets, strict=True)
    ]
    taken = {"The predicted strategy": [answer.regret.mid - 1 for answer in answers]}
    for name in ADAPTIVE:
        if all(name in row for row in regrets):
            taken[f"`{name}`"] = [row[name] for row in regrets]
    return [f"- {verdict(who, constant_of(own, fixed))}" for who, own in taken.items()]


def _map_row(found: Map, answer: LeadAnswer) -> list[str]:
    place, measured, predicted = answer.place, answer.measured, answer.predicted
    least = 0.0 if math.isnan(found.noise_floor) else found.noise_floor
    return [
        *_where(place.where),
        *(measured.name, f"{measured.factor:.2f}", ", ".join(measured.others)),
        *(predicted.name, f"{predicted.factor:.2f}", f"{100 * (answer.regret.mid - 1):.1f} %"),
        f"{place.ratio('auto', measured.name):.2f}",
        f"{place.ratio('priority', REFERENCE):.2f}",
        f"{place.exposed_ratio('priority', REFERENCE, least):.2f}",
    ]


def _where(where: MapPlace) -> list[str]:
    return [where.model, str(where.world_size), str(where.batch_size), where.links]


def _place_text(where: MapPlace) -> str:
    links = f" and {where.links}" if where.links else ""
    return f"{where.model} at batch size {where.batch_size}{links}"


def _percent(share: Interval) -> str:
    return f"{share.scaled(100):.0f} %"
