"""Score advice on a study: how much slower its first choice is than the best measured cell."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lab.advice.forecast import Forecast, contenders, ranked, steps_on
from lab.draw.text import markdown
from lab.simulate.fit import Group, Observation
from lab.simulate.score import NONE
from lab.simulate.source import Measured

CLOSE = 0.05  # a choice with less regret is as good as the best


@dataclass(frozen=True)
class Choice:
    """The first choice among the strategies measured in one scenario.

    Attributes:
        conditions: as in Group. profile: name of the model's.
        kind: "any" if all strategies could be chosen, "exact" if only those.
        chosen, best: names of the first choice, and of the strategy that was measured fastest.
        predicted_s, measured_s: step time of the first choice. best_s: measured step of the best.
        num_close: how many others advice cannot tell apart from its first choice.
    """

    conditions: str
    profile: str
    world_size: int
    batch_size: int
    kind: str
    num_strategies: int
    chosen: str
    predicted_s: float
    measured_s: float
    best: str
    best_s: float
    num_close: int

    @property
    def regret(self) -> float:
        """How much longer the choice's step takes than the best one, measured, relative."""
        return self.measured_s / self.best_s - 1


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
    header = ["links", "profile", "N", "batch", "of", "choice", "predicted ms", "measured ms"]
    header += ["best", "measured ms", "regret", "not told apart"]
    counts = [_count(found, kind) for kind in ("any", "exact")]
    return [*filter(None, counts), "", *markdown(header, [_line(choice) for choice in found])]


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
    forecasts = ranked(_forecast(group, cell, place) for place, cell in enumerate(cells))
    first, best = cells[int(forecasts[0].name)], min(cells, key=lambda cell: cell.step_s)
    return Choice(
        group.conditions,
        first.profile.name,
        first.world_size,
        first.world_size * first.per_rank_batch_size,
        kind,
        len(cells),
        first.name,
        forecasts[0].steps_s[0],
        first.step_s,
        best.name,
        best.step_s,
        len(contenders(forecasts)),
    )


def _forecast(group: Group, cell: Observation, place: int) -> Forecast:
    """Predict a cell; its name is its place, as one strategy may have been measured twice."""
    point = Measured(cell.profile), cell.strategy, cell.world_size, cell.per_rank_batch_size
    batch_size = cell.world_size * cell.per_rank_batch_size
    return Forecast(str(place), cell.strategy.lossy, batch_size, 1, steps_on(group, *point))


def _count(found: Sequence[Choice], kind: str) -> str:
    regrets = [choice.regret for choice in found if choice.kind == kind]
    if not regrets:
        return ""
    good = sum(regret <= CLOSE for regret in regrets)
    among = "all strategies" if kind == "any" else "exact strategies"
    return (
        f"- among {among}, the first choice is within {100 * CLOSE:g} % of the best measured cell "
        f"in {good} of {len(regrets)} scenarios; largest regret {100 * max(regrets):.1f} %"
    )


def _line(choice: Choice) -> list[str]:
    among = f"{choice.num_strategies}{' exact' if choice.kind == 'exact' else ''}"
    return [
        *(choice.conditions, choice.profile, str(choice.world_size), str(choice.batch_size)),
        *(among, choice.chosen, _ms(choice.predicted_s), _ms(choice.measured_s)),
        *(choice.best, _ms(choice.best_s), f"{100 * choice.regret:.1f} %", str(choice.num_close)),
    ]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"
