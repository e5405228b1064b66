"""The command line of lab.advise: lab.predict's, a target, and a grid of its own by default."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import compress

from lab.settings.config import PARTS
from lab.settings.errors import ConfigError
from lab.settings.fields import fields_of, parsed, setting, split
from lab.settings.files import choices_of, read_file
from lab.settings.names import is_of_strategy, root_of
from lab.settings.overrides import config_dir_of
from lab.settings.streams import progress
from lab.simulate import predict as prediction
from lab.simulate.fsdp import Groups
from lab.simulate.ineffective import OF_COMMANDS
from lab.simulate.network import Network
from lab.simulate.predict import PredictRequest, plain
from lab.simulate.strategy import Strategy
from lab.study.grid import Cell
from lab.study.grid import read as read_grid
from lab.sync.pattern import class_of

# Settings of lab.predict that advice takes too.
OF_PREDICTION = fields_of(prediction.PredictSettings)
del OF_PREDICTION["trace"]
UNITS = ("device", "node")
BOUND = re.compile(r"efficiency>=(.+)")
ESTIMATED_BATCH = 64  # samples of a rank
MOST_NODES = 8  # of hardware whose nodes are linked, unless world_size= says otherwise
OF_SOME = (*PARTS, "optim")  # that some strategies alone accept
# Emulate frameworks of 2016, which nobody would choose today unless named.
FRAMEWORKS = ("RootUpdate", "DoubleBuffer")


@dataclass(frozen=True)
class AdviseSettings:
    """The settings of lab.advise beside those of lab.predict."""

    target: str = setting(
        "throughput",
        "what to optimise: throughput, hours, cost, or 'efficiency>=0.8' (throughput with "
        "at least that efficiency)",
    )
    samples: float | None = setting(
        None, "samples per epoch; epochs=... sets the number of epochs", above=0
    )
    price_per_hour: float | None = setting(
        None, "price per device, or per node if price_of=node", above=0
    )
    price_of: str = setting("device", "whether the price is per device or per node", UNITS)
    knee: float = setting(
        1.5,
        "factor by which doubling the ranks must raise throughput to be worthwhile",
        at_least=1,
        at_most=2,
    )
    top: int = setting(5, "how many strategies of each kind to list", at_least=1)


@dataclass(frozen=True)
class Target:
    """The goal of a training.

    Attributes:
        text: as typed.
        least_efficiency: options below it are left out.
        samples: number of samples of one epoch; None: unknown.
        price_per_hour: of a `unit`, in any currency; None: unknown.
    """

    text: str = "throughput"
    least_efficiency: float = 0.0
    samples: float | None = None
    price_per_hour: float | None = None
    unit: str = "device"

    @classmethod
    def of(cls, own: AdviseSettings) -> Target:
        """Read a target as it is typed.

        Raises:
            ConfigError: there is none of that name, or it is cost without a price.
        """
        if own.target == "cost" and own.price_per_hour is None:
            raise ConfigError(
                "target=cost: needs price_per_hour=, the price per device (or per node, with "
                "price_of=node)"
            )
        least = _least_efficiency(own.target)
        return cls(own.target, least, own.samples, own.price_per_hour, own.price_of)

    def units(self, world_size: int, ranks_per_node: int) -> int:
        """Return how many devices or nodes are paid for."""
        return world_size if self.unit == "device" else math.ceil(world_size / ranks_per_node)

    def weight(self, world_size: int, ranks_per_node: int) -> float:
        """Return what a second counts: one, or the devices or nodes if cost is the target."""
        return self.units(world_size, ranks_per_node) if self.text == "cost" else 1

    def total_samples(
        self, epochs: float | None, steps: int | None, batch_size: int
    ) -> float | None:
        """Return how many samples a run trains on; None if nothing says so."""
        if steps is not None:
            return steps * batch_size
        return None if self.samples is None else self.samples * (epochs or 1)

    def hours(self, seconds_per_sample: float, total: float | None) -> float | None:
        """Return the hours of a training on `total` samples."""
        return None if total is None else total * seconds_per_sample / 3600


def _least_efficiency(text: str) -> float:
    if bound := BOUND.fullmatch(text):
        try:
            share = float(bound[1])
        except ValueError:
            share = math.nan
        if not 0 < share <= 1:
            raise ConfigError(f"target={text}: the efficiency must be above 0 and at most 1")
        return share
    if text == "efficiency":
        raise ConfigError(
            "target=efficiency: needs a bound, quoted for the shell: 'target=efficiency>=0.8'"
        )
    if text not in ("throughput", "hours", "cost"):
        raise ConfigError(
            f"target={text}: no such target; allowed: throughput, hours, efficiency>=SHARE or cost"
        )
    return 0.0


@dataclass(frozen=True)
class Advice:
    """A request for advice.

    Attributes:
        prediction: the cells to choose from, their profiles and hardware.
        knee, top: see AdviseSettings.
    """

    prediction: PredictRequest
    target: Target
    knee: float
    top: int


def read(arguments: Sequence[str]) -> Advice:
    """Read a request; what it leaves open of the grid is filled in.

    Strategies are all that have a cost model and fit the other settings; ranks are powers of two up
    to the hardware's size; batches go from a rank's in the profile to that of the largest number of
    ranks.

    Raises:
        ConfigError: a setting is wrong.
    """
    texts, run = split(arguments, fields_of(AdviseSettings))
    for argument in run:
        if argument.startswith("trace="):
            raise ConfigError(
                f"{argument} has no effect in lab.advise; use lab.predict to write the "
                "timeline of a cell"
            )
    own = parsed(AdviseSettings, texts)
    target = Target.of(own)
    request = _with_grid(run, target)
    keeps = _trains_together if "strategy" in _texts(run) else _divides_ranks
    kept = [keeps(request, cell) for cell in request.cells]
    if not any(kept):
        raise ConfigError(
            "strategy=none: its ranks exchange nothing, so they do not train together; choose "
            "among others"
        )
    cells, profiles = ([*compress(each, kept)] for each in (request.cells, request.profiles))
    request = replace(request, cells=cells, profiles=profiles)
    _require_samples(target, request)
    return Advice(request, target, own.knee, own.top)


def _require_samples(target: Target, request: PredictRequest) -> None:
    """Raise ConfigError if a training's hours are asked for, and nothing says how long it is."""
    for cell in request.cells:
        epochs, steps = cell.config.epochs, cell.config.steps
        if target.text == "hours" and target.total_samples(epochs, steps, 1) is None:
            given = "target=hours" if epochs is None else f"target=hours epochs={epochs:g}"
            raise ConfigError(
                f"{given}: needs samples=, the number of samples in an epoch, or steps="
            )


def _read(run: Sequence[str]) -> PredictRequest:
    """Read predictions; the commands that advice prints have settings of a training too."""
    return prediction.read(run, (*OF_COMMANDS, "precision=fp16"))  # which some strategies refuse


def _with_grid(run: list[str], target: Target) -> PredictRequest:
    given = _texts(run)
    if {"strategy", "world_size", "batch_size"} <= given.keys():
        return _read(run)
    sizes_given = given.get("world_size", "1").split(",")
    unit = math.lcm(*_integers(given.get("accumulate", "1")))
    batch = [] if "batch_size" in given else [f"batch_size={unit}"]
    one = ["world_size=1"] if all(map(_is_count, sizes_given)) else []  # else this is refused
    if "strategy" in given:
        first = _read([*run, *one, *batch])
    else:
        # What is wrong with any strategy is refused at once: to compose them all takes seconds.
        others = [word for word in run if not _is_of_strategy(word)]
        first = _read([*others, "strategy=allreduce", *one, *batch])
        _require_samples(target, first)
        run = [*run, f"strategy={','.join(_strategies([*run, *batch]))}"]
    if {"world_size", "batch_size"} <= given.keys():
        return _read(run)
    # Ranks and batches follow from the hardware and the profiles.
    # As many ranks as the hardware has, or on MOST_NODES if it names no number of nodes.
    nodes = len(first.hardware.node_rates) or MOST_NODES
    largest = first.hardware.ranks_per_node * (nodes if first.hardware.inter else 1)
    sizes = [2**power for power in range(largest.bit_length())]
    if "batch_size" in given:
        sizes = [size for size in sizes if all(_divides_batch(size, each) for each in first.cells)]
        return _read([*run, f"world_size={','.join(map(str, sizes))}"])
    if "world_size" in given:
        sizes = _integers(given["world_size"])
    grid = {"world_size": sizes, "batch_size": _batches(first, sizes, unit)}
    lists = [f"{key}={','.join(map(str, values))}" for key, values in grid.items()]
    return _read([*run, *lists])


def _is_of_strategy(word: str) -> bool:
    key = word.lstrip("+~").partition("=")[0]
    return is_of_strategy(key) or root_of(key) in OF_SOME


def _divides_batch(size: int, cell: Cell) -> bool:
    """Tell whether a cell's batch can be divided among `size` ranks."""
    weak = cell.config.scaling == "weak"
    return weak or cell.config.batch_size % (size * cell.config.accumulate) == 0


def _divides_ranks(request: PredictRequest, cell: Cell) -> bool:
    """Tell whether a cell's strategy can divide so many ranks among nodes as it wants."""
    strategy = Strategy.of(plain(cell.config))
    with suppress(ValueError):
        if strategy.pattern.gathers_units:
            Groups.of(strategy, Network(request.hardware, cell.world_size))
        return True
    return False


def _trains_together(_: PredictRequest, cell: Cell) -> bool:
    """Tell whether a cell's ranks exchange anything: otherwise they train a model each."""
    try:
        return cell.world_size == 1 or Strategy.of(plain(cell.config)).exchanges
    except ValueError:  # which a prediction says, too
        return True


def _texts(run: Sequence[str]) -> dict[str, str]:
    """Collect the settings of the study's file, if there is one, and of the command line."""
    pairs = (argument.partition("=") for argument in run)
    typed = {key: text for key, _, text in pairs}
    config_dir, study = config_dir_of(run), typed.get("study", "")
    known = study in choices_of("study", config_dir)
    of_file = read_file("study", study, config_dir) if known else {}
    return {key: str(value) for key, value in of_file.items()} | typed


def _integers(text: str) -> list[int]:
    """Parse a list of integers; [1] for any other text, which is refused when it is composed."""
    values = text.split(",")
    return [int(value) for value in values] if all(map(_is_count, values)) else [1]


def _is_count(text: str) -> bool:
    return text.isdigit() and int(text) > 0


def _strategies(run: Sequence[str]) -> list[str]:
    """List the strategies to choose from."""
    _, settings = split(run, (*OF_PREDICTION, "world_size"))
    fitting, refused = list[str](), list[ConfigError]()
    for name in progress(choices_of("strategy", config_dir_of(run)), "strategy"):
        try:
            cells = read_grid([*settings, f"strategy={name}", "world_size=1"]).cells
        except ConfigError as error:
            refused.append(error)
            continue
        if all(map(_may_be_chosen, cells)):
            fitting.append(name)
    if not fitting:
        raise (
            refused[0]
            if refused
            else ConfigError("strategy: no strategy with these settings has a cost model")
        )
    return fitting


def _may_be_chosen(cell: Cell) -> bool:
    """Tell whether a strategy exchanges, is no framework's, and can be predicted and run so."""
    settings = plain(cell.config)
    try:
        strategy = Strategy.of(settings)
        prediction.refuse_impossible(cell, strategy)
    except ValueError:
        return False
    return class_of(settings) not in FRAMEWORKS and bool(strategy.pattern.transfers)


def _batches(first: PredictRequest, sizes: Sequence[int], accumulate: int) -> list[int]:
    """Choose three batches: the profile's, that of all ranks together, and one in between.

    An estimated model has no batch of its own: ESTIMATED_BATCH stands for it.

    Weak scaling fixes the batch of a rank: the profile's, twice and four times as much.
    """
    reference = min(
        (profile.reference_batch for profile in first.profiles if profile), default=ESTIMATED_BATCH
    )
    if first.cells[0].config.scaling == "weak":
        unit, factors = accumulate, (1, 2, 4)
    else:
        unit, most = accumulate * math.lcm(*sizes), max(sizes)
        factors = (1, 2 ** round(math.log2(most) / 2), most)
    return sorted({max(1, round(factor * reference / unit)) * unit for factor in factors})
