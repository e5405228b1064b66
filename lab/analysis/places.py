"""The map of strategies: where they were measured alike, who leads there, and by how much."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from lab.analysis.charts import NothingToDraw
from lab.analysis.points import CEILING, Times, leaders_of, paired
from lab.analysis.records import RecordedCell
from lab.cluster.settings import RATE, bits_per_s
from lab.draw.chart import INK, LABEL_PX, LETTER, PALE_INK, WIDTH, Chart, alt, looks_of, order
from lab.draw.text import in_words
from lab.measure.statistics import (
    ENOUGH_REPEATS,
    UNKNOWN,
    Interval,
    geometric_mean,
    of_level,
    of_ratio,
    wilson,
)

REFERENCE = "overlap"  # exact, and what a trainer does without further thought
ADAPTIVE = ("auto",)  # chooses among others as it runs, so it is judged by the best of those
WITHIN = 0.03  # of the fastest fixed strategy: so close a choice made in a run should be
SLOWER = 0.02  # by more than this a schedule that should never lose has lost
CELL, ROW, LEAST = 140, 58, 480  # pixels of a place, and of all that are side by side
TOLD_APART, PALE = 0.5, 0.12  # share of a look's colour in a place; the rest is white
MOST_NAMED, FITTING = 2, 24  # others named in a place, and its characters; of more, the number
NOTE = (
    f"×: step time of {REFERENCE} / that of the fastest, with its 95 % interval; ≈ and pale: not "
    "significantly slower than the fastest; +3: three more"
)
WORDS = "split(replace(datum.label, regexp('cluster[.]|rate=', 'g'), ''), ' ')"  # a line for each


@dataclass(frozen=True)
class MapPlace:
    """A place of the map.

    Attributes:
        model: name of its profile if it is replayed, and by which of its settings runs differ.
        links: settings of links, and others by which runs differ: RecordedCell.circumstances.
        batch_size: global.
    """

    model: str
    links: str
    world_size: int
    batch_size: int


@dataclass(frozen=True)
class Lead:
    """The fastest fixed strategy of a place.

    Attributes:
        others: those that cannot be told apart from it.
        factor: step of REFERENCE over its step; NaN if that was not measured.
    """

    name: str
    others: tuple[str, ...]
    factor: Interval


@dataclass(frozen=True)
class Place:
    """The step times that were measured at a place, in seconds by strategy and repeat or turn.

    A strategy that was measured with several settings is as many: `priority sync.chunk_mb=4`.
    """

    where: MapPlace
    steps_s: Mapping[str, Times]

    def fixed(self) -> dict[str, Times]:
        """Return the strategies that may lead: all that train a common model one way."""
        return {k: v for k, v in self.steps_s.items() if k not in (CEILING, *ADAPTIVE)}

    def fastest(self) -> str:
        """Name the fixed strategy of the shortest step, by geometric means."""
        fixed = self.fixed()
        return min(fixed, key=lambda name: geometric_mean(list(fixed[name].values())))

    def lead(self, floor: float) -> Lead:
        """Find the fastest fixed strategy, and those that it was not shown to beat.

        Args:
            floor: see lab.analysis.points; NaN if unknown.
        """
        name = self.fastest()
        others = tuple(each for each in leaders_of(self.fixed(), floor) if each != name)
        return Lead(name, others, self.ratio(REFERENCE, name))

    def ratio(self, slow: str, fast: str) -> Interval:
        """Compute the ratio of two strategies' steps, in pairs.

        Without any pair it is that of their means, which has no interval; NaN if one was not
        measured.
        """
        slow_s, fast_s = (self.steps_s.get(name, {}) for name in (slow, fast))
        if slow_s.keys() & fast_s.keys():
            return of_ratio(*paired(slow_s, fast_s))
        slow_mean, fast_mean = (geometric_mean([*each.values()]) for each in (slow_s, fast_s))
        return Interval(math.nan, slow_mean / fast_mean, math.nan)

    def exposed_ratio(self, one: str, other: str, least: float) -> Interval:
        """Compute the ratio of two strategies' exposed exchange: step less that of none.

        Args:
            least: share of the other's step that its exposed exchange must exceed: a smaller one
                is noise.

        Returns:
            All NaN where it is noise, or was not measured.
        """
        alone, a, b = (self.steps_s.get(name, {}) for name in (CEILING, one, other))
        shared = [key for key in alone if key in a and key in b]
        first, second = ([each[r] - alone[r] for r in shared] for each in (a, b))
        is_noise = sum(second) <= least * sum(b[r] for r in shared)
        return UNKNOWN if is_noise or min(*first, *second) <= 0 else of_ratio(first, second)


def places_of(cells: Iterable[RecordedCell]) -> list[Place]:
    """Collect the places at which several fixed strategies were measured, with any exchange.

    Runs with a transform train another model, and weak scaling has other batches on other numbers
    of ranks: both are left out.
    """
    found: defaultdict[MapPlace, dict[str, dict[Hashable, float]]] = defaultdict(dict)
    counted = [cell for cell in cells if _counts(cell)]
    for cell in sorted(counted, key=lambda cell: order(cell.series)):
        found[_where(cell)].setdefault(cell.series, {}).update(cell.paired_s)
    places = (Place(where, _named(steps_s)) for where, steps_s in found.items())
    return [place for place in places if len(place.fixed()) > 1]


def _counts(cell: RecordedCell) -> bool:
    timed = cell.status == "done" and cell.measure == "throughput" and cell.world_size > 1
    alike = cell.scaling == "strong" and not cell.transform
    return timed and alike and not math.isnan(cell.step_s)


def _where(cell: RecordedCell) -> MapPlace:
    scaled = [f"{k}={v}" for k, v in cell.conditions.items() if k.startswith("model.")]
    model = cell.profile or cell.settings.get("model", "")
    return MapPlace(
        " ".join([model, *scaled]), cell.circumstances, cell.world_size, cell.batch_size
    )


def _named(steps_s: Mapping[str, Times]) -> dict[str, Times]:
    """Name each series by its strategy, and only where one has several, by all."""
    short = {series: series.split(" ")[0] for series in steps_s}
    counts = Counter(short.values())
    return {s if counts[short[s]] > 1 else short[s]: times for s, times in steps_s.items()}


def on_most_ranks(places: Iterable[Place]) -> list[Place]:
    """Keep the places of the largest number of ranks: a map has one."""
    known = list(places)
    most = max((place.where.world_size for place in known), default=0)
    return [place for place in known if place.where.world_size == most]


def columns_of(leads: Iterable[MapPlace]) -> list[str]:
    """List the links of a map, slow ones first."""
    return sorted({where.links for where in leads}, key=lambda links: (_rate(links), links))


def _rate(links: str) -> float:
    found = RATE.search(links)
    return bits_per_s(found[0]) if found else math.inf


@dataclass(frozen=True)
class StrategyPair:
    """Two strategies at one place.

    Attributes:
        step: ratio of their steps, paired by repeat. exposed: of their exposed exchange.
    """

    where: MapPlace
    names: tuple[str, str]
    step: Interval
    exposed: Interval


@dataclass(frozen=True)
class Summary:
    """Ratios of two strategies' steps over several places.

    Attributes:
        step, exposed: geometric means over places, with intervals over places.
        beyond: share of places where the ratio exceeds 1 + `limit`, with Wilson's interval.
        worst: the place with the largest ratio of steps.
    """

    num_places: int
    step: Interval
    num_exposed: int
    exposed: Interval
    limit: float
    beyond: Interval
    worst: StrategyPair


def behind(place: Place) -> dict[str, Interval]:
    """Return each strategy's step over that of the fastest fixed one, the fastest first."""
    fastest = place.fastest()
    found = {name: place.ratio(name, fastest) for name in place.steps_s}
    return dict(sorted(found.items(), key=lambda item: item[1].mid))


def against(
    places: Sequence[Place], name: str, other: str | None, floor: float
) -> list[StrategyPair]:
    """Compare two strategies at each place where both were measured.

    Args:
        other: None: the fastest fixed one of each place.
    """
    least, found = 0.0 if math.isnan(floor) else floor, list[StrategyPair]()
    for place in places:
        names = name, other or place.fastest()
        if place.steps_s.keys() >= {*names}:
            exposed = place.exposed_ratio(*names, least)
            found.append(StrategyPair(place.where, names, place.ratio(*names), exposed))
    return found


def summary(compared: Sequence[StrategyPair], limit: float) -> Summary | None:
    """Summarise over places; None without any."""
    if not compared:
        return None
    exposed = [each.exposed.mid for each in compared if not math.isnan(each.exposed.mid)]
    num_beyond = sum(each.step.mid > 1 + limit for each in compared)
    return Summary(
        len(compared),
        of_level([each.step.mid for each in compared]),
        len(exposed),
        of_level(exposed),
        limit,
        Interval.read(wilson(num_beyond, len(compared))),
        max(compared, key=lambda each: each.step.mid),
    )


def summaries(places: Sequence[Place], floor: float) -> dict[str, Summary]:
    """Summarise `auto` against the fastest fixed strategy, and `priority` against `overlap`."""
    pairs = {
        **{name: (against(places, name, None, floor), WITHIN) for name in ADAPTIVE},
        "priority": (against(places, "priority", REFERENCE, floor), SLOWER),
    }
    found = {name: summary(*pair) for name, pair in pairs.items()}
    return {name: each for name, each in found.items() if each}


def map_of_strategies(cells: Iterable[RecordedCell], floor: float, width: int = WIDTH) -> Chart:
    """Chart which fixed strategy was the fastest, at a study's largest number of ranks.

    Raises:
        NothingToDraw: strategies were not compared over several links, or models or batches.
    """
    places = on_most_ranks(places_of(cells))
    if len(places) < 2:
        raise NothingToDraw("strategies were compared in fewer than two cases")
    leads = {place.where: place.lead(floor) for place in places}
    counts = Counter(lead.name for lead in leads.values())
    most, ranks = max(counts.values()), places[0].where.world_size
    names = [name for name, count in counts.items() if count == most]
    verb = "is fastest" if len(names) == 1 else "are each fastest"
    message = f"On {ranks} ranks, {in_words(names)} {verb} in {most} of {len(places)} cases"
    sample = sample_of(len(place.steps_s[leads[place.where].name]) for place in places)
    body, _ = map_of({"": leads}, width=width)
    return Chart("map_of_strategies", message, [f"{NOTE}.", f"{sample}."], body, width)


def map_of(
    maps: Mapping[str, Mapping[MapPlace, Lead]],
    marked: Collection[tuple[str, MapPlace]] = (),
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
    kinds = sorted({(where.model, where.batch_size) for where in places})
    rows = [f"{model}|batch {batch}" for model, batch in kinds]
    data = pd.DataFrame(
        {
            **{"panel": panel, "links": where.links or "all the same", "fastest": lead.name},
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
    across = alt.X(
        "links:N", sort=[each or "all the same" for each in links], title=None, axis=axis
    )
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
    few = (
        f"; strategies with fewer than {ENOUGH_REPEATS} cannot be ranked"
        if known[0] < ENOUGH_REPEATS
        else ""
    )
    return f"{text} (repeats or turns of a strategy){few}"


def _text(base: Any, column: str, **look: Any) -> Any:
    return base.mark_text(fontSize=LABEL_PX, **look).encode(alt.Text(f"{column}:N"))


def _factor_text(lead: Lead) -> str:
    """Write by how much a lead is faster than REFERENCE; empty if it is that itself."""
    if lead.name == REFERENCE or math.isnan(lead.factor.mid):
        return ""
    return f"× {lead.factor:.2f}"


def _others_text(others: tuple[str, ...]) -> str:
    names = [name.split(" ")[0] for name in others]

    def text(most: int) -> str:
        more = f" +{len(names) - most}" if len(names) > most else ""
        return f"≈ {', '.join(names[:most])}{more}"

    if not names:
        return ""
    return text(MOST_NAMED) if len(text(MOST_NAMED)) <= FITTING else text(1)
