"""A study: the grid of cells that lists of settings span."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lab.cluster.settings import Cluster, cluster_of
from lab.settings.config import check_batch, load
from lab.settings.errors import ConfigError
from lab.settings.files import choices_of, is_file, read_file
from lab.settings.names import resolved, run_name, variant
from lab.settings.overrides import config_dir_of, parse_overrides, split
from lab.settings.own_code import fingerprint

SWEEP_SETTINGS = {
    "launcher": ("local", "what starts the ranks of a cell (local | slurm)"),
    "world_size": ("1", "numbers of ranks (a list)"),
    "repeats": ("1", "times that the whole grid is measured, one after the other"),
    "cell_timeout_s": ("3600", "a cell that takes longer is ended and recorded as timeout"),
}
DEFAULTS = {key: default for key, (default, _) in SWEEP_SETTINGS.items()} | {
    "study": "default",
    "runs_dir": "runs",
}
LAUNCHERS = ("local", "slurm")


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
        ranks = self.world_size if self.config.scaling == "weak" else 1
        return self.config.batch_size * ranks

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
        """All settings besides a study's axes, as a record holds them."""
        composed: Any = OmegaConf.to_container(self.config, resolve=True)
        return resolved(composed)

    @property
    def name(self) -> str:
        arguments = [*self.arguments, f"repeat={self.repeat}"]
        return run_name(arguments, self.strategy, self.world_size, fingerprint(self.config.code))


@dataclass(frozen=True)
class Study:
    """Cells in the order in which they run, and the settings of the sweep itself."""

    name: str
    runs_dir: str
    launcher: str
    cells: list[Cell]
    cell_timeout_s: float


def read(arguments: Sequence[str]) -> Study:
    """Read the study that a command line describes.

    `study=NAME` starts from conf/study/NAME.yaml if there is such a file; settings on the command
    line replace those of the file. Repeats are the outermost loop, so that drift of the machine
    favours no number of ranks; strategies are the innermost, so that compared runs are close in
    time.

    Raises:
        ConfigError: a cell has a wrong setting; nothing has run then. (Errors that only a
            constructor can find, with the data at hand, show up in the cell's own run.)
    """
    texts, run = split(_with_study_file(arguments), DEFAULTS)
    texts = DEFAULTS | texts
    name, launcher = _only("study", texts), _only("launcher", texts)
    if launcher not in LAUNCHERS:
        raise ConfigError(f"launcher={launcher}: allowed are {', '.join(LAUNCHERS)}")
    repeats, timeout_s = (_integer(key, _only(key, texts)) for key in ("repeats", "cell_timeout_s"))
    sizes = [_integer("world_size", size) for size in _values("world_size", texts["world_size"])]
    points = _points(_lists(run), sizes)
    if len({point.name for point in points}) < len(points):
        raise ConfigError(f"study={name}: a value is listed twice, or two differ in signs alone")
    cells = [
        dataclasses.replace(point, repeat=repeat) for repeat in range(repeats) for point in points
    ]
    return Study(name, _only("runs_dir", texts), launcher, cells, timeout_s)


def _points(lists: dict[str, list[str]], sizes: list[int]) -> list[Cell]:
    """Compose the cells of one repeat."""
    for key in ("cell", "repeat", "resume"):
        if key in lists:
            raise ConfigError(f"{' '.join(lists[key])}: a sweep sets this itself")
    strategies = lists.pop("strategy", ["strategy=allreduce"])
    return [
        _cell((strategy, *settings), size)
        for settings in itertools.product(*lists.values())
        for size in sizes
        for strategy in strategies
    ]


def _cell(arguments: tuple[str, ...], world_size: int) -> Cell:
    config = load(arguments)
    check_batch(config, world_size)
    cluster_of(config, world_size)
    return Cell(arguments, config, world_size)


def _lists(arguments: Sequence[str]) -> dict[str, list[str]]:
    """Expand lists: for each key, its settings as a command line would take them."""
    lists = dict[str, list[str]]()
    for override in parse_overrides(arguments):
        if override.is_sweep_override() and not override.is_choice_sweep():
            raise ConfigError(f"{override.input_line}: write the values as a list, a,b,c")
        settings = [str(override.input_line)]
        if override.is_choice_sweep():
            key = override.get_key_element()
            settings = [f"{key}={value}" for value in override.sweep_string_iterator()]
        lists[override.key_or_group] = settings
    return lists


def _with_study_file(arguments: Sequence[str]) -> list[str]:
    """Put the settings in conf/study/NAME.yaml, if there is such a study, before those typed."""
    texts, others = split(arguments, ("study",))
    name, config_dir = _only("study", DEFAULTS | texts), config_dir_of(arguments)
    if is_file(name):
        return [*_settings_of(name, config_dir), *arguments, f"study={Path(name).stem}"]
    load([f"study={name}"])  # becomes the name of a directory, and perhaps names a file
    known = choices_of("study", config_dir)
    if name in known:
        return [*_settings_of(name, config_dir), *arguments]
    if name != "default" and not [each for each in others if not each.startswith("config_dir=")]:
        raise ConfigError(
            f"study={name}: allowed are {', '.join(known)}, a path such as "
            "./mine.yaml, or a new name with settings to run"
        )
    return list(arguments)


def _settings_of(name: str, config_dir: str | None) -> list[str]:
    return [f"{key}={value}" for key, value in read_file("study", name, config_dir).items()]


def _values(key: str, text: str) -> list[str]:
    return [setting.partition("=")[2] for setting in _lists([f"{key}={text}"])[key]]


def _only(key: str, texts: dict[str, str]) -> str:
    values = _values(key, texts[key])
    if len(values) > 1:
        raise ConfigError(f"{key}={texts[key]}: takes one value")
    return values[0]


def _integer(key: str, text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"{key}={text}: must be an integer of at least 1")
    return int(text)
