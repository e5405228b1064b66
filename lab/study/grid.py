"""A study: the grid of cells that lists of settings span."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.cluster.settings import Cluster, cluster_of, straggler_of
from lab.settings.checks import as_text
from lab.settings.config import check_batch, check_name, global_batch_size, load, settings_of
from lab.settings.errors import ConfigError
from lab.settings.fields import fields_of, parsed, setting, split
from lab.settings.files import choices_of, is_file, read_file
from lab.settings.names import computation, resolved, run_name, variant
from lab.settings.overrides import config_dir_of, expanded, one_value
from lab.settings.own_code import fingerprint

if TYPE_CHECKING:
    from omegaconf import DictConfig


@dataclass(frozen=True)
class SweepSettings:
    """The settings of a sweep itself."""

    launcher: str = setting("local", "what starts the ranks of a cell", ("local", "slurm", "ray"))
    world_size: tuple[int, ...] = setting(
        (1,), "numbers of ranks (a list)", at_least=1, at_most=10**6
    )
    repeats: int = setting(1, "number of times to run the whole grid", at_least=1, at_most=10**4)
    cell_timeout_s: int = setting(
        3600, "time limit for a cell; when it expires, the cell is recorded as timeout", at_least=1
    )
    baselines: str = setting(
        "shared",
        "shared: strategies that compute the same on one rank share a one-rank run",
        ("shared", "all"),
    )
    turns: int | None = setting(
        None,
        "start all strategies together, and let them take turns of this many steps; null: each "
        "cell starts alone",
        at_least=1,
    )
    retry: str = setting(
        "none",
        "failed: rerun cells that failed, or ran out of memory or time",
        ("none", "failed"),
    )
    report: str = setting(
        "none", "live: serve the study's page on this machine while cells run", ("none", "live")
    )
    dry_run: bool = setting(
        False, "print the cells and the time and disk space that they need, and exit"
    )


WORLD_SIZE = fields_of(SweepSettings)["world_size"]
OF_SWEEP = frozenset(fields_of(SweepSettings))
# Settings of a run that a sweep reads too.
DEFAULTS = {"study": "default", "runs_dir": "runs"}
# Keys that say how a sweep runs, not which cells it has; and those of a cell that it sets.
NOT_OF_GRID = ("study", "runs_dir", "launcher", "cell_timeout_s", "retry", "report", "dry_run")
SET_BY_SWEEP = ("cell", "repeat", "resume")
MOST_CELLS = 10**5  # of a repeat; each is composed before the first one runs
CEILING = "none"  # the strategy over whose run of one rank speedup is computed, if there is one
# Outside quotes, no value of Hydra's grammar has an equals sign.
UNDER = re.compile(r"(?P<given>[\w.]+=[^:=,\s'\"\[{]+):(?P<setting>[~+]*(?P<key>[\w.@]+)=.*)")


@dataclass(frozen=True)
class Cell:
    """One point of a study: settings of `lab.train`, and how many ranks to start."""

    arguments: tuple[str, ...]
    config: DictConfig  # composed from `arguments`
    world_size: int
    repeat: int = 0

    @property
    def strategy(self) -> str:
        return self.config.strategy

    @property
    def batch_size(self) -> int:
        """Return the global batch size."""
        return global_batch_size(self.config, self.world_size)

    @property
    def over_horovod(self) -> bool:
        """Tell whether only horovodrun can start the ranks."""
        return "horovod" in self.config.comm["_target_"]

    @property
    def cluster(self) -> Cluster | None:
        """The emulated cluster on which the ranks are started, if any."""
        return cluster_of(self.config, self.world_size)

    @property
    def variant(self) -> dict[str, str]:
        return variant(list(self.arguments))

    @property
    def settings(self) -> dict[str, Any]:
        """All settings besides a study's axes, as a record holds them: without secrets."""
        return resolved(settings_of(self.config))

    @functools.cached_property
    def baseline(self) -> tuple[object, ...] | None:
        """The computation of a cell of one rank that strategies may share (lab.settings.names)."""
        same = computation(self.settings) if self.world_size == 1 else None
        if same is None:
            return None
        return (same, self.batch_size, self.config.scaling, self.config.measure)

    @property
    def name(self) -> str:
        arguments = [*self.arguments, f"repeat={self.repeat}"]
        return run_name(arguments, self.strategy, self.world_size, fingerprint(self.config.code))


@dataclass(frozen=True)
class Study:
    """Cells in reading order, and the settings of the sweep itself.

    Attributes:
        cells: repeats are the outermost loop; see lab.study.run.shuffled for the order of a run.
        grids: the arguments of each of its grids, without those of the sweep itself.
    """

    name: str
    runs_dir: str
    cells: list[Cell]
    grids: tuple[tuple[str, ...], ...]
    own: SweepSettings

    @property
    def retries(self) -> bool:
        """Whether cells that failed run again."""
        return self.own.retry == "failed"


def series_of(cells: Sequence[Cell]) -> list[str]:
    """Name the series of each cell: its strategy, and the settings in which the cells differ."""
    variants = [cell.variant for cell in cells]
    keys = {key for variant in variants for key in variant}
    differ = {key for key in keys if len({variant.get(key) for variant in variants}) > 1}
    return [
        " ".join([cell.strategy, *(f"{key}={v}" for key, v in variant.items() if key in differ)])
        for cell, variant in zip(cells, variants, strict=True)
    ]


def read(arguments: Sequence[str]) -> Study:
    """Read the study that a command line describes.

    `study=NAME` starts from conf/studies/NAME.yaml if there is such a file; settings on the command
    line replace those of the file. Repeats are the outermost loop, so that drift of the machine
    favours no number of ranks; strategies are the innermost, so that compared runs are close in
    time.

    Raises:
        ConfigError: a cell has a wrong setting; nothing has run then. (Errors that only a
            constructor can find, with the data at hand, show up in the cell's own run.)
    """
    of_study = (*OF_SWEEP, *DEFAULTS)
    conditions, plain = separate(_with_study_file(arguments), (*of_study, *SET_BY_SWEEP))
    given, run = split(plain, of_study)
    name, runs_dir = (one_value(key, DEFAULTS | given) for key in DEFAULTS)
    if "(" in (sizes := given.get("world_size", "")):  # range(1,5)
        listed = expanded([f"world_size={sizes}"])["world_size"]
        given = given | {"world_size": ",".join(each.partition("=")[2] for each in listed)}
    own = parsed(SweepSettings, given)
    points = _points(expanded(run), own.world_size, conditions, typed=arguments)
    if len({point.name for point in points}) < len(points):
        raise ConfigError(
            f"study={name}: two cells would have the same name, because two values of a list "
            "differ only in characters that names leave out, or only in secrets"
        )
    if own.baselines == "shared":
        points = _sharing(points)
    cells = [
        dataclasses.replace(point, repeat=repeat)
        for repeat in range(own.repeats)
        for point in points
    ]
    of_grid = (f"{key}={text}" for key, text in given.items() if key not in NOT_OF_GRID)
    grid = (*of_grid, *run, *(condition.text for condition in conditions))
    return Study(name, runs_dir, cells, (grid,), own)


def refuse_bare_study(arguments: Sequence[str]) -> None:
    """Refuse the name of a grid alone, for a command that runs one cell.

    Raises:
        ConfigError: nothing but a study of conf/studies is given.
    """
    given = {key: text for key, _, text in (each.partition("=") for each in arguments)}
    rest = given.keys() - {"study", "runs_dir", "config_dir"}
    name = given.get("study", "")
    if not rest and name in choices_of("study", config_dir_of(arguments)):
        raise ConfigError(f"study={name} is a grid of cells; run python -m lab.sweep study={name}")


def _points(
    lists: dict[str, list[str]],
    sizes: Sequence[int],
    conditions: Sequence[Condition],
    typed: Sequence[str],
) -> list[Cell]:
    """Compose the cells of one repeat."""
    for key in SET_BY_SWEEP:
        if key in lists:
            raise ConfigError(f"{' '.join(lists[key])} is set by the sweep itself; leave it out")
    num_cells = math.prod(map(len, [*lists.values(), sizes]))
    if num_cells > MOST_CELLS:
        given = " ".join(sorted(key for key, values in lists.items() if len(values) > 1))
        raise ConfigError(
            f"{given}: these lists span {num_cells:,} cells; at most {MOST_CELLS:,} are allowed"
        )
    strategies = lists.pop("strategy", ["strategy=allreduce"])
    plain = [
        ((strategy, *settings), size)
        for settings in itertools.product(*lists.values())
        for size in sizes
        for strategy in strategies
    ]
    # A study's file may have conditions for cells that a narrower grid leaves out.
    refuse_unmet([condition for condition in conditions if condition.text in typed], plain)
    # A setting that a condition replaces would otherwise give the same cell twice.
    points = dict.fromkeys(
        (under_it, size)
        for arguments, size in plain
        for under_it in under(conditions, arguments, size)
    )
    composed = functools.cache(load)  # once for all numbers of ranks
    return [_cell(arguments, composed(arguments), size) for arguments, size in points]


def _sharing(points: list[Cell]) -> list[Cell]:
    """Keep one of the cells of one rank that compute the same: that of `none`, or the first."""
    kept = dict[object, Cell]()
    for point in sorted(points, key=lambda point: point.strategy != CEILING):
        if point.baseline:
            kept.setdefault(point.baseline, point)
    return [point for point in points if not point.baseline or kept[point.baseline] is point]


def _cell(arguments: tuple[str, ...], config: DictConfig, world_size: int) -> Cell:
    check_batch(config, world_size)
    cluster_of(config, world_size)
    straggler_of(config, world_size)
    return Cell(arguments, config, world_size)


def _with_study_file(arguments: Sequence[str]) -> list[str]:
    """Put the settings in conf/studies/NAME.yaml, if there is one, before those typed."""
    texts, others = split(arguments, ("study",))
    name, config_dir = one_value("study", DEFAULTS | texts), config_dir_of(arguments)
    if is_file(name):
        return [*_settings_of(name, config_dir), *arguments, f"study={Path(name).stem}"]
    check_name("study", name)
    known = choices_of("study", config_dir)
    if name in known:
        return [*_settings_of(name, config_dir), *arguments]
    alone = (*NOT_OF_GRID, "config_dir")
    if name != "default" and all(each.partition("=")[0] in alone for each in others):
        raise ConfigError(
            f"study={name}: no such study; allowed: {', '.join(known)}, a path such as "
            "./mine.yaml, or a new name with settings to run"
        )
    return list(arguments)


def _settings_of(name: str, config_dir: str | None) -> list[str]:
    content = read_file("study", name, config_dir)
    return [f"{key}={as_text(value)}" for key, value in content.items()]


@dataclass(frozen=True)
class Condition:
    """A setting, and the one that a cell must have for it to apply.

    Attributes:
        text: as typed.
        given: the setting of the cell, such as strategy=onebit.
        key: the key that is set in such a cell.
        settings: its values, as a command line would take them.
    """

    text: str
    given: str
    key: str
    settings: tuple[str, ...]


def separate(
    arguments: Sequence[str], of_sweep: Collection[str]
) -> tuple[list[Condition], list[str]]:
    """Separate settings under a condition from all others; the last one of a key counts.

    Args:
        of_sweep: keys that belong to the sweep and not to a cell.

    Raises:
        ConfigError: a condition sets one of these.
    """
    conditions, others = dict[tuple[str, str], Condition](), list[str]()
    for argument in arguments:
        if not (found := UNDER.fullmatch(argument)):
            others.append(argument)
            continue
        given, key = found["given"], found["key"]
        if key in of_sweep or key == given.partition("=")[0]:
            raise ConfigError(f"{argument}: a condition cannot set {key}")
        ((_, settings),) = expanded([found["setting"]]).items()
        conditions[given, key] = Condition(argument, given, key, tuple(settings))
    return list(conditions.values()), others


def under(
    conditions: Sequence[Condition], arguments: tuple[str, ...], world_size: int
) -> list[tuple[str, ...]]:
    """Return the arguments of the cells that a cell becomes under the conditions which it meets.

    A setting under a condition replaces that of the same key.
    """
    met = [c for c in conditions if c.given in (*arguments, f"world_size={world_size}")]
    keys = {condition.key for condition in met}
    kept = [a for a in arguments if a.lstrip("~+").partition("=")[0] not in keys]
    return [(*kept, *chosen) for chosen in itertools.product(*(c.settings for c in met))]


def refuse_unmet(
    conditions: Sequence[Condition], points: Sequence[tuple[tuple[str, ...], int]]
) -> None:
    """Refuse a condition that no cell meets.

    Args:
        points: arguments and world size of each cell.

    Raises:
        ConfigError: the message names the condition, and what cells have instead.
    """
    had = dict.fromkeys(
        setting for arguments, size in points for setting in (*arguments, f"world_size={size}")
    )
    for condition in conditions:
        if condition.given in had:
            continue
        key = condition.given.partition("=")[0]
        others = ", ".join(s for s in had if s.partition("=")[0] == key)
        rest = f"cells have {others}" if others else f"the grid does not set {key}"
        raise ConfigError(f"{condition.text}: no cell has {condition.given}; {rest}")
