"""A study: the grid of cells that lists of settings span."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass

from omegaconf import DictConfig

from lab.cluster.settings import Cluster, cluster_of
from lab.settings.config import (
    ConfigError,
    check_batch,
    choices_of,
    load,
    parse_overrides,
    read_file,
)
from lab.settings.names import run_name, variant

SWEEP_SETTINGS = {
    "launcher": ("local", "what starts the ranks of a cell (local | slurm)"),
    "world_size": ("1", "numbers of ranks (a list)"),
    "repeats": ("1", "times that the whole grid is measured, one after the other"),
    "cell_timeout_s": ("3600", "a cell that takes longer is ended and recorded as timeout"),
}
LAUNCHERS = ("local", "slurm")


@dataclass(frozen=True)
class Cell:
    """One point of a study: settings of `lab.train`, and how many ranks to start."""

    arguments: tuple[str, ...]
    config: DictConfig  # what they make
    world_size: int
    repeat: int = 0

    @property
    def strategy(self) -> str:
        return self.config.strategy

    @property
    def batch_size(self) -> int:
        """Of all ranks together."""
        ranks = self.world_size if self.config.scaling == "weak" else 1
        return self.config.batch_size * ranks

    @property
    def over_horovod(self) -> bool:
        """Whether horovodrun alone can start its ranks."""
        return "horovod" in self.config.comm["_target_"]

    @property
    def cluster(self) -> Cluster | None:
        """The emulated one that its ranks are started on, if any."""
        return cluster_of(self.config, self.world_size)

    @property
    def variant(self) -> dict[str, str]:
        return variant(list(self.arguments))

    @property
    def name(self) -> str:
        return run_name([*self.arguments, f"repeat={self.repeat}"], self.strategy, self.world_size)


@dataclass(frozen=True)
class Study:
    """Cells in the order in which they run, and the settings of the sweep itself."""

    name: str
    runs_dir: str
    launcher: str
    cells: list[Cell]
    cell_timeout_s: float


def read(arguments: list[str]) -> Study:
    """The study that a command line describes.

    `study=NAME` starts from conf/study/NAME.yaml if there is such a file; settings on the command
    line replace its. Repeats are the outermost loop, so that a machine that drifts does not make
    one number of ranks look better; strategies are the innermost, so that what is compared runs
    close together.

    Raises:
        ConfigError: any cell has a wrong setting. Nothing has run then. (What only a constructor
            can judge, with the data at hand, comes to light in the cell's own run.)
    """
    lists = _lists(arguments)
    name = _only(lists, "study", "default")
    load([f"study={name}"])  # names a directory, and maybe a file
    if not lists and name not in ("default", *choices_of("study")):
        known = ", ".join(choices_of("study"))
        raise ConfigError(f"study={name}: allowed are {known}, or a new name with settings to run")
    lists = _study_file(name) | lists
    runs_dir = _only(lists, "runs_dir", "runs")
    launcher = _only(lists, "launcher", "local")
    if launcher not in LAUNCHERS:
        raise ConfigError(f"launcher={launcher}: allowed are {', '.join(LAUNCHERS)}")
    repeats = _positive(lists, "repeats")
    timeout_s = _positive(lists, "cell_timeout_s")
    sizes = [_integer("world_size", value) for value in lists.pop("world_size", ["1"])]
    for key in ("cell", "repeat", "resume"):
        if key in lists:
            raise ConfigError(f"{key}={','.join(lists[key])}: a sweep sets this itself")
    strategies = lists.pop("strategy", ["allreduce"])
    points = [
        _cell(dict(zip(lists, values, strict=True)), strategy, size)
        for values in itertools.product(*lists.values())
        for size in sizes
        for strategy in strategies
    ]
    if len({point.name for point in points}) < len(points):
        raise ConfigError(f"study={name}: a value is listed twice, or two differ in signs alone")
    cells = [
        dataclasses.replace(point, repeat=repeat) for repeat in range(repeats) for point in points
    ]
    return Study(name, runs_dir, launcher, cells, timeout_s)


def _cell(settings: dict[str, str], strategy: str, world_size: int) -> Cell:
    arguments = (f"strategy={strategy}", *(f"{key}={value}" for key, value in settings.items()))
    config = load(list(arguments))
    check_batch(config, world_size)
    cluster_of(config, world_size)
    return Cell(arguments, config, world_size)


def _lists(arguments: list[str]) -> dict[str, list[str]]:
    """Each setting's values, as text that a command line would take."""
    lists = {}
    for override in parse_overrides(arguments):
        if override.is_sweep_override() and not override.is_choice_sweep():
            raise ConfigError(f"{override.input_line}: write the values as a list, a,b,c")
        if override.is_choice_sweep():
            values = list(map(str, override.sweep_string_iterator()))
        else:
            values = [str(override.input_line).partition("=")[2]]
        lists[override.get_key_element()] = values
    return lists


def _study_file(name: str) -> dict[str, list[str]]:
    if name not in choices_of("study"):
        return {}
    return _lists([f"{key}={value}" for key, value in read_file("study", name).items()])


def _only(lists: dict[str, list[str]], key: str, default: str) -> str:
    values = lists.pop(key, [default])
    if len(values) > 1:
        raise ConfigError(f"{key}={','.join(values)}: takes one value")
    return values[0]


def _positive(lists: dict[str, list[str]], key: str) -> int:
    return _integer(key, _only(lists, key, SWEEP_SETTINGS[key][0]))


def _integer(key: str, text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"{key}={text}: must be an integer of at least 1")
    return int(text)
