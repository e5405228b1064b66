"""Networks, benchmarks and runs, against which claims about a single device are checked.

A claim's `at:` holds the arguments of its quantity, a function here or in lab/claims/benched.py. A
quantity counts (no clock: it holds on any machine) or measures. Ends of intervals are combined so
that the result is as wide as it can be: terms that a benchmark measured in turns share their drift,
which cannot be told from their intervals alone.
"""

from __future__ import annotations

import functools
import math
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.claims.metrics import Missing
from lab.draw.text import markdown
from lab.measure.statistics import Interval, of_level, of_ratio
from lab.settings import checks
from lab.settings.config import load
from lab.settings.errors import ConfigError
from lab.settings.overrides import own_choices
from lab.settings.storage import read_json

if TYPE_CHECKING:  # pandas and torch take seconds, and not every paper needs them
    from lab.analysis.records import RecordedCell
    from lab.problem import Blueprint


@dataclass(frozen=True)
class DevicePaper:
    """Networks to count, and what was measured.

    Attributes:
        networks: settings of a run by the name that claims use.
        benches: words after lab.bench by the name of their result.
        folder: holds NAME.json for the results that there are; None: there are none.
        cells: runs of the paper's study.
        figures: of the source's own tables: numbers, or lists and mappings of them.
    """

    networks: Mapping[str, str] = field(default_factory=dict[str, str])
    benches: Mapping[str, str] = field(default_factory=dict[str, str])
    folder: Path | None = None
    cells: Sequence[RecordedCell] = ()
    figures: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def environments(self) -> list[Mapping[str, Any]]:
        """Those of the runs, as far as they are known."""
        return [cell.environment for cell in self.cells if cell.environment]

    def measured_on(self, result: str | None) -> str | None:
        """Return "gpu" or "cpu", on which a result or, without a name, the runs were measured.

        Returns:
            None: nothing was measured.
        """
        try:
            return kind_of([self.result(result)["environment"]] if result else self.environments)
        except Missing:
            return None

    def figure(self, path: str | float) -> float:
        """Return a figure of the source's tables by its keys and places, joined by "/".

        Raises:
            Missing: the source gives none there.
            ValueError: there is no such place.
        """
        found: Any = path if isinstance(path, int | float) else self.figures
        for key in str(path).split("/") if found is self.figures else ():
            try:
                found = found[int(key) if isinstance(found, list) else key]
            except (LookupError, TypeError, ValueError):
                raise ValueError(f"{path}: the source's tables have no such figure") from None
        if found is None:
            raise Missing
        return float(found)

    def blueprint(self, network: str) -> Blueprint:
        """Build a network for its shapes. ValueError: the paper names no such network."""
        from lab.problem import blueprint

        return blueprint(load(self._settings(network)))

    def batch(self, network: str) -> int:
        """Return the batch that a network's settings give it."""
        return load(self._settings(network)).batch_size

    def result(self, name: str) -> dict[str, Any]:
        """Return a result of lab.bench.

        Raises:
            Missing: there is none.
            ValueError: the paper has no such benchmark, or the file is none of its results.
        """
        checks.one_of("result", name, self.benches)
        path = self.folder / f"{name}.json" if self.folder else None
        if path is None or not path.is_file():
            raise Missing
        return _read(path, self.benches[name].split()[0])

    def results(self) -> dict[str, dict[str, Any]]:
        """Return all results that there are, by name."""
        found: dict[str, dict[str, Any]] = {}
        for name in self.benches:
            with suppress(Missing):
                found[name] = self.result(name)
        return found

    def _settings(self, network: str) -> Sequence[str]:
        checks.one_of("network", network, self.networks)
        return own_choices(shlex.split(self.networks[network]))


def kind_of(environments: Sequence[Mapping[str, Any]]) -> str | None:
    """Return "gpu" if any of the machines has one, "cpu" if none has; None without a machine."""
    if not environments:
        return None
    return "gpu" if any(where.get("gpus") for where in environments) else "cpu"


@functools.cache
def _read(path: Path, bench: str) -> dict[str, Any]:
    try:
        result = read_json(path)
    except OSError as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(result, dict) or result.get("bench") != bench:
        raise ValueError(f"{path}: must be a result of lab.bench {bench}")
    return result


Quantity = Callable[..., Interval]


def matches(pattern: str, *names: str) -> bool:
    """Tell whether a regular expression matches one of the names entirely."""
    return any(re.fullmatch(pattern, name) for name in names)


def exact(value: float) -> Interval:
    """Return a value that has no interval because nothing about it is uncertain."""
    return Interval(value, value, value)


def total(values: Iterable[Interval]) -> Interval:
    """Add up; of nothing it is 0."""
    terms = list(values)
    return Interval(*(sum(getattr(term, end) for term in terms) for end in ("lo", "mid", "hi")))


def ratio(numerator: Interval, denominator: Interval) -> Interval:
    """Divide positive values."""
    ends = (numerator.lo / denominator.hi, numerator.mid / denominator.mid)
    return Interval(*ends, numerator.hi / denominator.lo)


def difference(first: Interval, second: Interval) -> Interval:
    """Subtract."""
    return Interval(first.lo - second.hi, first.mid - second.mid, first.hi - second.lo)


# torch is imported in functions: not every paper needs it.


def parameters(device: DevicePaper, network: str) -> Interval:
    """Count a network's parameters."""
    model = device.blueprint(network).model
    return exact(sum(each.numel() for each in model.parameters()))


def weight_layers(device: DevicePaper, network: str, apart: str = "") -> Interval:
    """Count convolutions and fully connected layers.

    Args:
        apart: a regular expression for the paths of those that do not count, such as shortcuts.
    """
    from torch import nn

    layers = device.blueprint(network).model.named_modules()
    kinds = nn.Conv2d | nn.Linear
    return exact(sum(isinstance(layer, kinds) and not matches(apart, at) for at, layer in layers))


def fc_parameter_share(device: DevicePaper, network: str) -> Interval:
    """Divide the parameters of fully connected layers by all."""
    from torch import nn

    model = device.blueprint(network).model
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    connected = sum(each.numel() for layer in layers for each in layer.parameters())
    return exact(connected / sum(each.numel() for each in model.parameters()))


def network_operations(device: DevicePaper, network: str, layers: str | None = None) -> Interval:
    """Count operations of the forward pass of one sample.

    Args:
        layers: a regular expression for the paths or classes of the layers to count; None: all
            operations, between layers too.
    """
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    plan = device.blueprint(network)
    data, model = plan.data, plan.model
    inputs = torch.zeros(1, *data.input_shape, dtype=data.input_dtype, device="meta")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(inputs)
    if layers is None:
        return exact(counter.get_total_flops())
    by_module, root = counter.get_flop_counts(), type(model).__name__
    chosen = (
        sum(by_module.get(f"{root}.{path}", {}).values())
        for path, layer in model.named_modules()
        if path and not any(True for _ in layer.children())  # innermost
        if matches(layers, path, type(layer).__name__)
    )
    return exact(sum(chosen))


def operation_share(device: DevicePaper, network: str, layers: str) -> Interval:
    """Divide the forward operations of the layers that match by all."""
    chosen, all_of_them = (network_operations(device, network, each) for each in (layers, None))
    return exact(chosen.mid / all_of_them.mid)


def step_bytes(device: DevicePaper, network: str, batch_size: int, optim: str = "sgd") -> Interval:
    """Compute the memory that a training step needs at most (lab.device.footprint)."""
    from lab.device.footprint import StepSettings, footprint
    from lab.training.optim import Optim

    plan = device.blueprint(network)
    optimizer = Optim(load(own_choices([f"optim={optim}"])).optim, batch_size).optimizer
    step = StepSettings(
        plan.data.input_shape, plan.data.input_dtype, plan.target, plan.task.loss, optimizer
    )
    return exact(footprint(plan.model, step, batch_size).total_bytes)


def executed_share(
    device: DevicePaper, network: str, layer: str, algorithm: str, tile: int = 1
) -> Interval:
    """Divide the operations of a convolution's forward pass by an algorithm by its definition's.

    Args:
        tile: rows and columns that a kernel of algorithm=gemm computes at once.

    Raises:
        Missing: the algorithm refuses the convolution.
    """
    from lab.convolution import Pass
    from lab.convolution.algorithms import ALGORITHMS, Gemm
    from lab.convolution.layer import convolutions_of

    plan, batch = device.blueprint(network), device.batch(network)
    shape, dtype = plan.data.input_shape, plan.data.input_dtype
    problem = convolutions_of(plan.model, shape, dtype, batch)[layer]
    chosen = Gemm((tile, tile)) if algorithm == Gemm.name else ALGORITHMS[algorithm]
    if chosen.refusal(problem, Pass.FORWARD):
        raise Missing
    return exact(chosen.total(problem, Pass.FORWARD).operations / problem.operations)


def refusals(device: DevicePaper, network: str, algorithm: str) -> Interval:
    """Count the convolutions that an algorithm refuses."""
    from lab.convolution import Pass
    from lab.convolution.algorithms import ALGORITHMS
    from lab.convolution.layer import convolutions_of

    plan = device.blueprint(network)
    found = convolutions_of(plan.model, plan.data.input_shape, plan.data.input_dtype, 1)
    chosen = ALGORITHMS[algorithm]
    return exact(sum(chosen.refusal(each, Pass.FORWARD) is not None for each in found.values()))


def operations_per_output(
    _device: DevicePaper,
    algorithm: str,
    kernel: int,
    size: int = 27,
    channels: int = 96,
    filters: int = 256,
    batch: int = 256,
) -> Interval:
    """Divide what an algorithm executes in a forward pass by outputs and input channels.

    Args:
        kernel, size: sides of the square filters and images; outputs are as large as inputs.
        channels, filters, batch: of the convolution; by default conv2 of slide 8 of Kim et al.
    """
    from lab.convolution import Pass, Problem
    from lab.convolution.algorithms import ALGORITHMS

    sides = {"size": (size, size), "kernel": (kernel, kernel), "padding": (kernel // 2,) * 2}
    problem = Problem(
        batch=batch, channels=channels, filters=filters, stride=(1, 1), groups=1, **sides
    )
    executed = ALGORITHMS[algorithm].total(problem, Pass.FORWARD).operations
    return exact(executed / (batch * filters * channels * size**2))


def printed(device: DevicePaper, terms: Sequence[Sequence[str | float]]) -> Interval:
    """Add up products of figures that the source prints: arithmetic on its tables, no evidence.

    Args:
        terms: each the factors of a product: paths of figures, and numbers such as those of units.
    """
    return exact(sum(math.prod(map(device.figure, term)) for term in terms))


def printed_rows(device: DevicePaper, more: str, than: str, among: str = ".*") -> Interval:
    """Count the rows of the source's table in which one column exceeds another.

    Args:
        more, than: machine and place of the columns, as server/5.
        among: a regular expression for the rows, as "LSTM/Torch"; rows without a figure count not.
    """
    exceeding = 0
    for network, entry in device.figures.items():
        for tool in entry["tools"]:
            row = f"{network}/tools/{tool}"
            with suppress(Missing):
                if matches(among, f"{network}/{tool}"):
                    exceeding += device.figure(f"{row}/{more}") > device.figure(f"{row}/{than}")
    return exact(exceeding)


ALL_COUNTED: tuple[Quantity, ...] = (
    *(parameters, weight_layers, fc_parameter_share, network_operations, operation_share),
    *(step_bytes, executed_share, refusals, operations_per_output, printed, printed_rows),
)
OF_PRINT = ("printed", "printed_rows")  # read nothing but the source's own figures
COUNTED = {quantity.__name__: quantity for quantity in ALL_COUNTED}


def mini_batch_s(device: DevicePaper, model: str, threads: int) -> Interval:
    """Return the seconds of a step of a network, over repeats."""
    return of_level(list(_seconds(device, model, threads).values()))


def mini_batch_ratio(
    device: DevicePaper,
    model: str,
    over_model: str | None = None,
    threads: int = 1,
    over_threads: int = 1,
) -> Interval:
    """Divide a network's seconds of a step by another's, paired by repeat.

    Args:
        over_model: None: the same network, on other threads.
    """
    first = _seconds(device, model, threads)
    second = _seconds(device, over_model or model, over_threads)
    shared = sorted(first.keys() & second.keys())
    if not shared:
        raise Missing
    return of_ratio([first[repeat] for repeat in shared], [second[repeat] for repeat in shared])


def _seconds(device: DevicePaper, model: str, threads: int) -> dict[int, float]:
    """Return the median step of each repeat."""
    wanted = {"model": model, "threads": str(threads)}
    found = {
        cell.repeat: cell.step_s
        for cell in device.cells
        if cell.status == "done" and wanted.items() <= cell.record.variant.items()
    }
    if not found:
        raise Missing
    return found


SWEPT: dict[str, Quantity] = {"mini_batch_s": mini_batch_s, "mini_batch_ratio": mini_batch_ratio}


Seconds = tuple[float | None, ...]  # None: not published
GPUS = ("GTX 980", "GTX 1080", "K80")
# By machine: threads of a CPU, or GPUs.
COLUMNS = {"desktop": (1, 2, 4, 8), "server": (1, 2, 4, 8, 16, 32), "gpu": GPUS}


@dataclass(frozen=True)
class PaperNetwork:
    """A network of the table.

    Attributes:
        tools: published seconds by tool and machine, as COLUMNS.
        here: seconds by number of threads, as the study measured them.
    """

    name: str
    model: str
    batch_size: int
    tools: Mapping[str, Mapping[str, Seconds]]
    here: Mapping[int, Interval]

    def published(self, machine: str, place: int) -> dict[str, float]:
        """Return the seconds of each tool that has a figure for one column of a machine."""
        figures = {tool: seconds[machine][place] for tool, seconds in self.tools.items()}
        return {tool: seconds for tool, seconds in figures.items() if seconds is not None}

    def fastest(self, machine: str) -> str:
        """Name the shortest seconds on a machine, with tool and column."""
        found = [
            (seconds, f"{seconds:g} ({tool}, {column}{'' if machine == 'gpu' else ' threads'})")
            for place, column in enumerate(COLUMNS[machine])
            for tool, seconds in self.published(machine, place).items()
        ]
        return min(found)[1] if found else "–"


def networks(table: Mapping[str, Any], device: DevicePaper) -> tuple[PaperNetwork, ...]:
    """Read a paper's table, and join what its study measured.

    Raises:
        ValueError: an entry is malformed; the message names its network.
    """
    return tuple(_network(name, entry, device) for name, entry in table.items())


def mini_batches_table(found: Sequence[PaperNetwork]) -> list[str]:
    """Write a line for each network, in seconds."""
    header = ["network", "batch", "Torch, desktop, 1 and 2 threads", "all tools, desktop, 1 thread"]
    header += ["fastest on the desktop", "on the server", "on a GPU", "here, 1 thread", "2 threads"]
    return markdown(header, [_line(each) for each in found])


def _network(name: str, entry: Any, device: DevicePaper) -> PaperNetwork:
    try:
        tools = {
            tool: {machine: tuple(machines[machine]) for machine in COLUMNS}
            for tool, machines in entry["tools"].items()
        }
        for tool, machines in tools.items():
            for machine, seconds in machines.items():
                if (wanted := len(COLUMNS[machine])) != len(seconds):
                    where = f"{tool}: {machine}={list(seconds)}"
                    raise TypeError(f"{where}: must have {wanted} entries, null for no figure")
                for value in (each for each in seconds if each is not None):
                    checks.number(f"{tool}: {machine}", value, above=0)
        here: dict[int, Interval] = {}
        for threads in (1, 2):
            with suppress(Missing):
                here[threads] = mini_batch_s(device, entry["model"], threads)
        return PaperNetwork(name, entry["model"], entry["batch_size"], tools, here)
    except (AttributeError, KeyError, TypeError, ConfigError) as error:
        raise ValueError(f"table: {name}: {error}") from None


def _line(one: PaperNetwork) -> list[str]:
    torch = [one.published("desktop", place).get("Torch") for place in (0, 1)]
    alone = sorted(one.published("desktop", 0).values())
    return [
        *(one.name, str(one.batch_size), ", ".join(f"{s:g}" if s else "–" for s in torch)),
        f"{alone[0]:g} to {alone[-1]:g}" if alone else "–",
        *map(one.fastest, COLUMNS),
        *(f"{one.here[threads]:.3g}" if threads in one.here else "–" for threads in (1, 2)),
    ]
