"""Advice as data: every option, ranked, and the first choices among exact and lossy ones.

Options are ranked by their predicted steps, on hardware and on each draw of what it leaves open.
Choices are held to the best constant one: the strategy that is best to take everywhere, known in
hindsight. Those that do not beat it could have been spared.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import mean
from typing import Any

from lab.advice.request import Advice
from lab.model.profile import Profile
from lab.settings.config import PARTS
from lab.settings.errors import ConfigError
from lab.settings.names import root_of, variant
from lab.settings.streams import progress
from lab.simulate.estimate import ESTIMATE, Source, profile_on
from lab.simulate.hardware import Hardware, Link
from lab.simulate.predict import (
    groups_of,
    intervals,
    machines,
    note_of_update,
    plain,
    sources_of,
    strategy_of,
    unread,
)
from lab.simulate.score import Group, held_out, score, scored_cell, skill
from lab.simulate.step import predict, simulate
from lab.simulate.strategy import Strategy, rank_bytes
from lab.simulate.terms import residual_of
from lab.study.grid import Cell, series_of

Row = dict[str, Any]
KINDS = ("exact", "lossy")
RENDEZVOUS = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "HOST:29400"]  # HOST: the first node
NEXT_SETTING = re.compile(r" (?=[\w.]+=)")
UNRECORDED = "not recorded; to compare, train with it and with allreduce"  # an accuracy
FREE = 1e18  # bytes per second: no message, and no pass over memory, takes time
CODECS = "docs/exchanges/compression.md, Other codecs"
ROUNDS = "docs/exchanges/schedules.md, Exchanging every H steps"
FEEDBACK = "docs/results/README.md, Error feedback"
# Steps of held-out cells are predicted within 3.6 % in the median (docs/results/links.md), which no
# interval of an option includes: options closer than this are not told apart.
MODEL_ERROR = 0.05
CLOSE = 0.05  # a choice with less regret is as good as the best


@dataclass(frozen=True)
class Forecast:
    """The predicted steps of one option.

    Attributes:
        name: of the option among those that it competes with, as a strategy's.
        lossy: see lab.simulate.strategy.Strategy.
        weight: what a second of its time counts (see Target.weight).
        steps_s: the predicted step time, then that on each draw. The draws are the same for all
            options of a group.
    """

    name: str
    lossy: bool
    batch_size: int
    weight: float
    steps_s: tuple[float, ...]

    @property
    def seconds_per_sample(self) -> float:
        return self.steps_s[0] / self.batch_size

    def costs(self) -> list[float]:
        """Return weighted seconds per sample, on the hardware and on each draw."""
        return [self.weight * step_s / self.batch_size for step_s in self.steps_s]


def steps_on(
    group: Group, source: Source, strategy: Strategy, world_size: int, per_rank_batch_size: int
) -> tuple[float, ...]:
    """Predict a step on a group's hardware, and on each of its draws.

    Raises:
        ValueError: the hardware has too few ranks.
    """
    point = strategy, world_size, per_rank_batch_size
    return tuple(simulate(*machine, *point).step_s for machine in machines(group, source))


def ranked(forecasts: Iterable[Forecast]) -> list[Forecast]:
    """Return the forecasts, the cheapest first."""
    return sorted(forecasts, key=lambda forecast: forecast.costs()[0])


def contenders(forecasts: Sequence[Forecast]) -> list[Forecast]:
    """Return those of ranked forecasts that cannot be told apart from the first one.

    Both meet the same draws, so what they have in common cancels. An option is told apart if it is
    dearer on every draw, and by more than MODEL_ERROR as predicted.
    """
    first, *others = forecasts
    close = []
    for other in others:
        ratios = [one / best for one, best in zip(other.costs(), first.costs(), strict=True)]
        if min(ratios) <= 1 or ratios[0] <= 1 + MODEL_ERROR:
            close.append(other)
    return close


def advised(advice: Advice) -> dict[str, Any]:
    """Predict and rank all options.

    Returns:
        `rows` (every option that fits the memory, the best first), and by kind, "exact" or
        "lossy": `best`, places in `rows` of each series' best option, with the efficiency that the
        target asks for; `contenders`, of those that the first cannot be told apart from.

    Raises:
        ConfigError: a strategy has no cost model, the hardware has too few ranks, or the study to
            fit to cannot be read.
    """
    request = advice.prediction
    try:
        group = _group(advice)
        sources, names = sources_of(request), series_of(request.cells)
        cells = [*zip(names, request.cells, sources, strict=True)]
        bar = progress(cells, "option")
        options = [_option(advice, group, *cell) for cell in bar]
        errors = score(held_out(scored_cell(group, cell) for cell in group.observations))
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from None
    options = [replace(option, knee=_knee(option, options, advice.knee)) for option in options]
    limit_bytes = group.hardware.memory_bytes
    # An option is kept, too, where its bytes or the device's are not known.
    kept = [each for each in options if not limit_bytes or not each.memory_bytes > limit_bytes]
    ordered = sorted(kept, key=lambda option: option.forecast.costs()[0])
    profiles = {
        profile.name: profile
        for profile in (profile_on(source, group.hardware) for source in sources)
    }
    fitting = {option.forecast.name for option in kept}
    return {
        "target": asdict(advice.target),
        "knee": advice.knee,
        "top": advice.top,
        "rows": [_row(advice, group, option) for option in ordered],
        **_choices(ordered, advice.target.least_efficiency),
        "most_efficient": max((one.efficiency for one in kept), default=math.nan),
        "too_large": sorted({one.forecast.name for one in options} - fitting),
        "profiles": {name: asdict(profile) for name, profile in profiles.items()},
        "open_profiles": [name for name, profile in profiles.items() if profile.is_open],
        "updates": [*dict.fromkeys(filter(None, (option.update for option in kept)))],
        "hardware": {"conditions": group.conditions, **asdict(group.hardware)},
        "fit": str(request.own.fit) if request.own.fit else None,
        "errors": str(errors) if errors.num_cells else None,
        "idle": unread(request),
    }


def _choices(ordered: Sequence[Option], least_efficiency: float) -> dict[str, Any]:
    """Choose among the best options of each series, apart for exact and lossy ones."""
    places: dict[str, int] = {}
    for place, option in enumerate(ordered):
        if option.efficiency >= least_efficiency:
            places.setdefault(option.forecast.name, place)
    found: dict[str, Any] = {"best": {}, "contenders": {}, "constant": {}}
    for kind in KINDS:
        best = [p for p in places.values() if ordered[p].forecast.lossy == (kind == "lossy")]
        forecasts = [ordered[place].forecast for place in best]
        close = {each.name for each in contenders(forecasts)} if forecasts else set[str]()
        found["best"][kind] = best
        found["contenders"][kind] = [p for p in best if ordered[p].forecast.name in close]
        of_kind = [one for one in ordered if one.forecast.lossy == (kind == "lossy")]
        found["constant"][kind] = _constant(of_kind)
    return found


def _constant(options: Sequence[Option]) -> str | None:
    """Say what one series for all ranks and batches costs, as predicted; None without a choice.

    The options are ordered, the best first. One rank exchanges nothing, so it is no scenario.
    """
    rates: dict[tuple[int, int], dict[str, float]] = {}
    for option in options:
        place = option.cell.world_size, option.cell.batch_size
        if option.cell.world_size > 1:
            rates.setdefault(place, {}).setdefault(option.forecast.name, option.samples_per_s)
    if len(rates) < 2 or max(map(len, rates.values())) < 2:
        return None
    regrets = [{k: max(each.values()) / v - 1 for k, v in each.items()} for each in rates.values()]
    found = constant_of([0.0] * len(regrets), regrets)
    return found and found.text


def _row(advice: Advice, group: Group, option: Option) -> Row:
    cell, forecast, target = option.cell, option.forecast, advice.target
    total = target.total_samples(cell.config.epochs, cell.config.steps, cell.batch_size)
    hours = target.hours(forecast.seconds_per_sample, total)
    ranks_per_node = group.hardware.ranks_per_node
    units = target.units(cell.world_size, ranks_per_node)
    shortest_s, longest_s = option.interval_s
    cost = None
    if target.price_per_hour is not None:
        per_sample = target.price_per_hour * units * forecast.seconds_per_sample / 3600
        cost = per_sample * (1e6 if total is None else total)
    return {
        "series": forecast.name,
        "basis": option.basis,
        "strategy": cell.strategy,
        "world_size": cell.world_size,
        "batch_size": cell.batch_size,
        "per_rank_batch_size": cell.batch_size // cell.world_size,
        "accumulate": cell.config.accumulate,
        "scaling": cell.config.scaling,
        "lossy": forecast.lossy,
        "step_s": forecast.steps_s[0],
        "step_s_interval": (shortest_s, longest_s),
        "samples_per_s": option.samples_per_s,
        "samples_per_s_interval": (cell.batch_size / longest_s, cell.batch_size / shortest_s),
        "efficiency": option.efficiency,
        "hours": hours,
        "cost": cost,
        "cost_of_samples": 1e6 if total is None else total,
        "memory_bytes": None if math.isnan(option.memory_bytes) else option.memory_bytes,
        "limit": option.limit[0],
        "limit_share": option.limit[1],
        "knee": option.knee,
        "accuracy": known_of(cell) if forecast.lossy else "as on one rank, except for rounding",
        "command": train_command(cell, ranks_per_node),
    }


def _group(advice: Advice) -> Group:
    """Return the hardware to predict on: of a study's groups, the one that the cells belong to."""
    groups = groups_of(advice.prediction)
    if len(groups) == 1:
        return groups[0]
    cell = advice.prediction.cells[0]
    settings = {key: str(value) for key, value in cell.settings.items()}
    named = []
    for group in groups:  # whose conditions have keys of the machine, too
        pairs = (text.partition("=") for text in NEXT_SETTING.split(group.conditions))
        if all(settings.get(key, value) == value for key, _, value in pairs):
            named.append(group)
    if len(named) != 1:
        known = "; ".join(group.conditions for group in groups)
        raise ValueError(
            f"fit={advice.prediction.own.fit}: its cells were measured under several conditions; "
            f"add the settings of one of them: {known}"
        )
    return named[0]


@dataclass(frozen=True)
class Option:
    """A cell that may be chosen.

    Attributes:
        basis: of its times, as in lab.predict.
        interval_s: 95 %, of its step.
        forecast: its predicted steps; its name is the series'.
        memory_bytes: of the rank that needs most, without activations; NaN: unknown.
        update: how its optimizer counts (lab.simulate.predict.note_of_update).
        limit: name and share, as lab.advice.advise finds them.
        knee: the ranks from which twice as many gain too little; None: there is no such number
            among the cells.
    """

    cell: Cell
    basis: str
    interval_s: tuple[float, float]
    forecast: Forecast
    efficiency: float
    memory_bytes: float
    update: str
    limit: tuple[str, float]
    knee: int | None = None

    @property
    def samples_per_s(self) -> float:
        return 1 / self.forecast.seconds_per_sample


def _option(advice: Advice, group: Group, name: str, cell: Cell, source: Source) -> Option:
    strategy, size = strategy_of(advice.prediction, cell, source), cell.world_size
    weak, per_rank = cell.config.scaling == "weak", cell.batch_size // size
    hardware = group.hardware
    profile = profile_on(source, hardware)
    steps_s = steps_on(group, source, strategy, size, per_rank)
    weight = advice.target.weight(size, hardware.ranks_per_node)
    residual = residual_of(hardware, strategy, size)
    return Option(
        cell,
        "profile" if isinstance(source, Profile) else ESTIMATE,
        intervals("step_s", steps_s, residual)["step_s_interval"],
        Forecast(name, strategy.lossy, cell.batch_size, weight, steps_s),
        predict(profile, hardware, strategy, size, cell.batch_size, weak).efficiency,
        rank_bytes(profile, strategy, plain(cell.config), size, hardware),
        note_of_update(cell, source, strategy, hardware),
        limit(profile, hardware, strategy, size, per_rank),
    )


def _knee(option: Option, options: Sequence[Option], least_gain: float) -> int | None:
    """Return the smallest number of ranks of an option's series that should not be doubled."""
    rates = {
        one.cell.world_size: one.samples_per_s
        for one in options
        if one.cell.arguments == option.cell.arguments
    }
    knees = (n for n in sorted(rates) if 2 * n in rates and rates[2 * n] < least_gain * rates[n])
    return next(knees, None)


def _links(hardware: Hardware, **changes: float) -> Hardware:
    def changed(link: Link | None) -> Link | None:
        return replace(link, **changes) if link else None

    rates = () if "bandwidth_bytes_per_s" in changes else hardware.node_rates
    return replace(
        hardware, intra=changed(hardware.intra), inter=changed(hardware.inter), node_rates=rates
    )


# Hardware without one of its limits. "host" is all that a rank does besides model and exchange.
RELIEFS: dict[str, Callable[[Hardware], Hardware]] = {
    "latency": lambda hardware: _links(hardware, latency_s=0.0),
    "bandwidth": lambda hardware: _links(hardware, bandwidth_bytes_per_s=FREE),
    "codec": lambda hardware: replace(
        hardware, codec_bytes_per_s=FREE, codec_rates=(), codec_s=0.0
    ),
    "host": lambda hardware: replace(
        hardware,
        overhead_s=0.0,
        overhead_s_per_rank=0.0,
        update_bytes_per_s=None,
        input_samples_per_s=None,
        reduce_bytes_per_s=None,
    ),
    "stragglers": lambda hardware: replace(hardware, jitter=0.0, num_slow=0),
}


def limit(
    profile: Profile,
    hardware: Hardware,
    strategy: Strategy,
    world_size: int,
    per_rank_batch_size: int,
) -> tuple[str, float]:
    """Name what limits a step, and the share of the step that goes if it takes no time.

    Returns:
        "compute" (forward and backward), or a key of RELIEFS.
    """
    point = strategy, world_size, per_rank_batch_size
    now_s = simulate(profile, hardware, *point).step_s
    without = {
        name: simulate(profile, relief(hardware), *point).step_s for name, relief in RELIEFS.items()
    }
    without["compute"] = simulate(profile.scaled(time_scale=0.0), hardware, *point).step_s
    name = min(without, key=lambda each: without[each])
    return name, 1 - without[name] / now_s


@dataclass(frozen=True)
class AccuracyTrial:
    """Test accuracy on digits, on two ranks and with default settings.

    Attributes:
        percent: mean over the seeds. reference: that of allreduce. source: where it is recorded.
    """

    model: str
    num_seeds: int
    percent: float
    reference: float
    source: str

    def __str__(self) -> str:
        seeds = f"{self.num_seeds} seeds" if self.num_seeds > 1 else "1 seed"
        return f"{self.model} {self.percent} (allreduce {self.reference}, {seeds})"


def _codec(mlp: float, lenet: float) -> tuple[AccuracyTrial, ...]:
    return AccuracyTrial("MLP", 3, mlp, 96.39, CODECS), AccuracyTrial(
        "LeNet", 1, lenet, 97.22, CODECS
    )


CHANGES = {"exchange", "sync", *PARTS}  # settings with which a strategy is another one
# By strategy; a strategy that is not here has no recorded trial.
TRIALS: dict[str, tuple[AccuracyTrial, ...]] = {
    "fp16": (AccuracyTrial("LeNet", 1, 97.22, 97.22, CODECS),),
    "int8": _codec(96.39, 97.22),
    "onebit": (AccuracyTrial("MLP", 5, 96.56, 96.5, FEEDBACK),),
    "signsgd_ef": _codec(96.85, 96.39),
    "topk": _codec(95.74, 97.22),
    "randomk": _codec(95.0, 96.94),
    "powersgd": _codec(96.3, 97.22),
    "local_sgd": (
        AccuracyTrial("LeNet", 1, 97.2, 97.2, ROUNDS),
        AccuracyTrial("MLP", 1, 96.4, 96.7, ROUNDS),
    ),
    "diloco": (
        AccuracyTrial("LeNet", 1, 97.5, 97.2, ROUNDS),
        AccuracyTrial("MLP", 1, 96.7, 96.7, ROUNDS),
    ),
}


def known_of(cell: Cell) -> str:
    """Write what is known of a lossy strategy's accuracy with default settings, and its sources."""
    changed = {root_of(key) for key in variant(cell.arguments)} & CHANGES
    trials = () if changed else TRIALS.get(cell.strategy, ())
    if not trials:
        return UNRECORDED
    sources = "; ".join(dict.fromkeys(trial.source for trial in trials))
    return f"{', '.join(map(str, trials))}: {sources}"


def train_command(cell: Cell, ranks_per_node: int) -> str:
    """Return the command line of lab.train for a cell.

    Args:
        ranks_per_node: more ranks are divided among nodes, on each of which the command runs.
    """
    settings, size = list(cell.arguments), cell.world_size
    if cell.cluster and cell.config.cluster.hosts is None:
        settings.append(f"cluster.hosts={cell.cluster.num_hosts}")
    if cell.over_horovod:
        launcher = ["horovodrun", "-np", str(size), "python"]
    elif cell.cluster or size == 1:
        launcher = ["python"]
    elif size <= ranks_per_node:
        launcher = ["torchrun", "--nproc-per-node", str(size)]
    else:
        nodes = ["--nnodes", str(-(-size // ranks_per_node))]
        local = ["--nproc-per-node", str(ranks_per_node)]
        launcher = ["torchrun", *nodes, *local, *RENDEZVOUS]
    return shlex.join([*launcher, "-m", "lab.train", *settings])


@dataclass(frozen=True)
class Constant:
    """One strategy in every scenario, beside choices that were made for each.

    Attributes:
        name: of the strategy whose regret is the least on average, of those in every scenario.
        regrets: its own, by scenario. taken: those of the choices.
        num_close: how many strategies have less regret than CLOSE in every scenario. num_shared:
            how many there are in every scenario.
    """

    name: str
    regrets: tuple[float, ...]
    taken: tuple[float, ...]
    num_close: int
    num_shared: int

    @property
    def skill(self) -> float:
        """The skill of the choices' mean regret over the constant's; NaN if that has none."""
        return skill(mean(self.taken), mean(self.regrets))

    @property
    def text(self) -> str:
        """The constant choice, its regret, and how many would have done."""
        close = f"{self.num_close} {'is' if self.num_close == 1 else 'are'}"
        everywhere = f"in all {len(self.regrets)} scenarios"
        others = (
            f"Of the {self.num_shared} strategies that appear {everywhere}, {close} always within "
            f"{100 * CLOSE:g} % of the best strategy of the scenario."
        )
        return (
            f"the best constant choice (one strategy for every scenario) is `{self.name}`. "
            f"Its regret is {_percents(self.regrets)}. "
            + (others if self.num_shared > 1 else f"No other strategy appears {everywhere}.")
        )


def constant_of(taken: Iterable[float], regrets: Sequence[Mapping[str, float]]) -> Constant | None:
    """Find the best constant choice; None: there is one scenario, or no strategy is in all.

    Args:
        taken: regret of what was chosen, by scenario.
        regrets: of each strategy, by scenario.
    """
    shared = [name for name in regrets[0] if all(name in each for each in regrets)]
    if not shared or len(regrets) == 1:
        return None
    constant = {name: tuple(each[name] for each in regrets) for name in shared}
    name = min(shared, key=lambda each: mean(constant[each]))
    num_close = sum(max(each) <= CLOSE for each in constant.values())
    return Constant(name, constant[name], tuple(taken), num_close, len(shared))


def verdict(who: str, found: Constant | None) -> str:
    """Say whether choices, which `who` names, beat the best constant choice."""
    if found is None:
        needed = "a strategy that appears in all of several scenarios"
        return f"{who} cannot be compared with a constant choice, which needs {needed}."
    own, constant = mean(found.taken), mean(found.regrets)
    equal = own == constant
    word = "does as well as" if equal else "beats" if own < constant else "does not beat"
    skill = "" if math.isnan(found.skill) else f" (skill {found.skill:.2f})"
    regret = "its regret is also" if equal else f"the regret of {who[0].lower()}{who[1:]} is"
    return (
        f"In hindsight, {found.text} {who} {word} the constant choice{skill}: {regret} "
        f"{_percents(found.taken)}."
    )


def _percents(regrets: Sequence[float]) -> str:
    return f"{100 * mean(regrets):.1f} % on average and {100 * max(regrets):.1f} % at most"
