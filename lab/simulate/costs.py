"""Costs of an exchange as configured: its stages, whole or of a reduce-scatter, bytes, memory.

The classes in lab/exchange say them to a Load, or their code is recorded (lab.simulate.recorded).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, cast

from omegaconf import DictConfig, OmegaConf

from lab.exchange.cost import Costs, Shape, Sizes
from lab.exchange.grouping import checked_ends, phase_shares
from lab.settings.config import build, choices_of
from lab.settings.errors import ConfigError, one_line
from lab.settings.files import read_file
from lab.settings.names import class_name
from lab.settings.own_code import is_labs, targets, user_traceback
from lab.simulate.hardware import Hardware
from lab.simulate.network import CollectiveCost, Network

if TYPE_CHECKING:
    from lab.exchange.base import Exchange

GROUPS = ("exchange", "path", "codec", "memory")  # whose choices are parts of an exchange
# Operations of matrix products in the time of a byte of codecs: assumed. A core computes ten; the
# tensor cores of an H100 two hundred at half of their peak.
OPERATIONS_PER_BYTE = {"gloo": 10.0, "nccl": 200.0}

Settings = Mapping[str, Any]
FSDP = "FSDP"  # its copies have a rate of their own
PHASES = ("first", "second", "third")
BY_ITSELF = ("Auto", "Schedule")  # decide by the clock, or by the step, which of others to take


def class_of(exchange: Settings) -> str:
    """Return the class name of a configured exchange of the lab's; of a user's, its path."""
    return class_name(exchange["_target_"])


@dataclass(frozen=True)
class Stage:
    """Seconds in which a rank computes (row "codec") or its links are busy (row "exchange").

    Attributes:
        payload_bytes: bytes that the busiest rank sends.
        inside: only links inside nodes are busy, so that those between nodes may be as well.
        codec: whose rate it takes to compute, by the exchange's class name.
        across_bytes: bytes that a node's ranks together send to other nodes; NaN: not known.
        calls: of a codec, which a host makes.
    """

    row: str
    seconds: float
    payload_bytes: float = 0.0
    intra_node: bool = False
    codec: str = ""
    across_bytes: float = 0.0
    calls: float = 0

    def scaled(self, share: float) -> Stage:
        """Return a share of the stage, as of one step or one transfer."""
        if share == 1.0:
            return self
        return Stage(  # in a third of the time of dataclasses.replace
            self.row,
            self.seconds * share,
            self.payload_bytes * share,
            self.intra_node,
            self.codec,
            self.across_bytes * share,
            self.calls * share,
        )


@dataclass
class Load(Costs):
    """One bucket on a network, and the stages of its exchange so far.

    Attributes:
        shapes: shapes of the bucket's parameters.
        rate: whose rate codecs have: an exchange's class, as `class_of` names it.
        network: the ranks and their links.
    """

    shapes: Sequence[Shape]
    rate: str
    network: Network
    stages: list[Stage] = field(default_factory=list)

    def add(
        self,
        exchange: Exchange,
        shapes: Sequence[Shape] | None = None,
        network: Network | None = None,
        part: str = "whole",
        share: float = 1.0,
    ) -> float:
        from lab.exchange.base import runs_as_the_labs  # with torch

        rate = class_name(path := _path(exchange))
        load = Load(self.shapes if shapes is None else shapes, rate, network or self.network)
        with blamed(path):
            # A formula of the lab's is not that of a subclass that does something else.
            holds = runs_as_the_labs(exchange) or not is_labs(type(exchange), "add_cost")
            if part != "whole" or not (holds and exchange.add_cost(load)):
                # Imported where there is no formula: it records a run of the exchange's code.
                from lab.simulate import recorded

                recorded.add_stages(load, exchange, part)
        self.stages += [stage.scaled(share) for stage in load.stages]
        return share * sum(stage.seconds for stage in load.stages)

    def codec(self, num_bytes: float, calls: int = 1) -> None:
        hardware = self.network.hardware
        seconds = calls * hardware.codec_s + num_bytes / hardware.codec_rate(self.rate)
        factor = hardware.host_factor(self.N) * self.network.slowest_factor
        self.stages.append(Stage("codec", factor * seconds, codec=self.rate, calls=calls))

    def products(self, operations: Sequence[float]) -> None:
        """Add a stage of matrix products, of so many operations on each rank.

        The busiest rank counts; where ranks share cores, they also compute all products together.
        """
        hardware = self.network.hardware
        dearest = max(max(operations), sum(operations) / (hardware.num_cores or self.N))
        rate = OPERATIONS_PER_BYTE[hardware.library] * hardware.codec_rate(self.rate)
        seconds = self.network.slowest_factor * dearest / rate
        self.stages.append(Stage("codec", seconds, codec=self.rate, calls=1))

    def wire(self, cost: CollectiveCost, inside: bool = False) -> None:
        sent = cost.payload_bytes, inside
        self.stages.append(Stage("exchange", cost.seconds, *sent, across_bytes=cost.across_bytes))


def ways_of(exchange: Settings) -> dict[str, Settings]:
    """Return the exchanges that one is made of, by name; none if it is made of no others."""
    if class_of(exchange) == "Auto":
        return {name: exchange["candidates"][name] for name in exchange["among"]}
    if class_of(exchange) == "Schedule":
        return {name: exchange[name] for name in PHASES if exchange[name]}
    return {}


def phases_of(exchange: Settings) -> list[tuple[float, Settings]]:
    """List the exchanges of a run, each with its share of the steps.

    Raises:
        ValueError: `exchange` is a schedule in steps of a run of unknown length.
    """
    if class_of(exchange) != "Schedule":
        return [(1.0, exchange)]
    shares = phase_shares(exchange["until"])
    return list(zip(shares, ways_of(exchange).values(), strict=True))


def longest_phase(exchange: Settings) -> Settings:
    """Return the exchange of most steps, of which a record's median step is; see `phases_of`."""
    return max(phases_of(exchange), key=lambda phase: phase[0])[1]


def in_shares(exchange: Settings, num_steps: int | None) -> Settings:
    """Return an exchange whose phases, if it has some in steps, are shares of `num_steps`.

    Raises:
        ValueError: phases do not end where those of a Schedule may.
    """
    if class_of(exchange) != "Schedule":
        return exchange
    lasting = ways_of(exchange)
    until = checked_ends(exchange["until"], len(lasting))
    if num_steps is None:
        return exchange
    ends = [end if end < 1 else end / num_steps for end in until]
    # Phases that would begin after the run's last step are left out.
    kept = 1 + sum(end < 1 for end in ends)
    unused = dict.fromkeys(list(lasting)[kept:])
    return {**exchange, **unused, "until": ends[: kept - 1]}


def exchange_of(settings: Settings) -> Exchange:
    """Return the exchange that was configured, to ask for its costs; one for equal settings.

    Nothing is imported or called that settings alone name: classes are the lab's own choices, or
    exchanges and codecs that have been imported already.

    Args:
        settings: `_target_` and its arguments.

    Raises:
        ValueError: it is no such class, or has other arguments.
    """
    composed = isinstance(settings, DictConfig)
    plain = OmegaConf.to_container(settings, resolve=True) if composed else settings
    return _built(json.dumps(plain, sort_keys=True, default=list))


def stages_of(shapes: Sequence[Shape], exchange: Settings, network: Network) -> list[Stage]:
    """List the stages of one bucket of parameters of `shapes`. ValueError as in `exchange_of`."""
    load = Load(shapes, class_of(exchange), network)
    load.add(exchange_of(exchange))
    return load.stages


def add_scatter(load: Load, exchange: Settings) -> None:
    """Append the stages of a reduce-scatter to a Load of padded shapes.

    Args:
        exchange: NoExchange: torch's own.

    Raises:
        ValueError: the exchange has no reduce-scatter.
    """
    from lab.exchange.allreduce import AllReduce  # with torch, which settings and help do not need

    network, part = load.network, load.num_bytes / load.N
    if class_of(exchange) == "NoExchange":
        # Over Gloo it is an all-reduce, of which each rank keeps a part.
        gloo = network.hardware.library == "gloo"
        load.wire(network.all_reduce(load.num_bytes) if gloo else network.reduce_scatter(part))
        return
    made = exchange_of(exchange)
    if not isinstance(made, AllReduce):
        load.add(made, part="scatter")
    elif made.exact:
        load.wire(network.reduce_scatter(part))
    else:
        load.codec(1.5 * load.num_bytes)
        load.wire(network.all_to_all(part / 2))
        load.codec(load.num_bytes / 2 + part)


def payload_bytes(shapes: Sequence[Shape], exchange: Settings, network: Network) -> float:
    """Count the bytes that the busiest rank sends for one bucket. ValueError as `exchange_of`."""
    return sum(stage.payload_bytes for stage in stages_of(shapes, exchange, network))


def extra_bytes(sizes: Sizes, exchange: Settings) -> float:
    """Count the bytes a rank needs besides weights, gradients and the optimizer's state.

    Returns:
        NaN for an exchange of unknown memory, such as a user's own.

    Raises:
        ValueError: as in `exchange_of`.
    """
    made = exchange_of(exchange)
    with blamed(_path(made)):
        needs = made.memory_bytes(sizes)
    return max(4 * sizes.gathered, needs.scratch) + needs.kept


@lru_cache(maxsize=1000)
def _built(text: str) -> Exchange:
    settings = _with_classes_of_today(json.loads(text))
    with blamed(settings["_target_"]):
        return build(cast(DictConfig, OmegaConf.create(settings)))


def _path(exchange: Exchange) -> str:
    kind = type(exchange)
    return f"{kind.__module__}.{kind.__qualname__}"


@contextmanager
def blamed(path: str) -> Iterator[None]:
    """Name the exchange, by its class's path, whose code fails: a user's may raise anything.

    Raises:
        ConfigError: in place of any error that the user's code raised.
    """
    try:
        yield
    except ConfigError:  # which says more
        raise
    except Exception as error:
        if (found := user_traceback(error)) is None:
            raise
        why = f"{type(found.error).__name__}: {one_line(found.error)} ({found.place})"
        raise ConfigError(f"exchange={path}: fails in a prediction: {why}") from None


def _with_classes_of_today(value: Any) -> Any:
    """Replace the paths of classes by those that they have now; records have had others."""
    if isinstance(value, Mapping):
        found = {key: _with_classes_of_today(each) for key, each in value.items()}
        if "_target_" in found:
            found["_target_"] = _path_of(str(found["_target_"]))
        return found
    if isinstance(value, str) and "${" in value:  # would be looked up here
        raise ValueError(f"exchange: {value}: must be a plain value, not an interpolation")
    return [_with_classes_of_today(each) for each in value] if isinstance(value, list) else value


def _path_of(path: str) -> str:
    if path.startswith("lab."):
        known = _own_paths()
        if path in known.values() or (path := known.get(_key(path), path)) in known.values():
            return path
        allowed = ", ".join(choices_of("exchange"))
        raise ValueError(f"exchange={class_name(path)} is not an exchange; allowed: {allowed}")
    from lab.codec.base import Codec
    from lab.exchange.base import Exchange
    from lab.exchange.memory import Memory

    module, _, name = path.replace(":", ".").rpartition(".")
    found = getattr(sys.modules.get(module), name, None)
    if isinstance(found, type) and issubclass(found, Exchange | Codec | Memory):
        return path
    raise ValueError(
        f"exchange={path} is neither one of the lab's exchanges nor an imported class of your own"
    )


def refuse_unknown_rates(hardware: Hardware) -> None:
    """Refuse rates of codecs that no exchange of the lab's has; a user's has a path with a dot.

    Raises:
        ValueError: names the first.
    """
    for name, _ in hardware.codec_rates:
        known = {FSDP, *map(class_name, _own_paths().values())}
        if name not in known and "." not in name:
            where, allowed = f"hardware={hardware.name}: codec_rates.{name}", sorted(known)
            raise ValueError(f"{where}: no such exchange; allowed: {', '.join(allowed)}")


@cache
def _own_paths() -> dict[str, str]:
    """Return the paths of the lab's exchanges and their parts, by package and class name."""
    nodes = [dict(read_file(group, choice)) for group in GROUPS for choice in choices_of(group)]
    return {_key(path): path for path in targets(nodes)}


def _key(path: str) -> str:
    return f"{path.split('.')[1]}.{class_name(path)}"  # an exchange and a codec may be namesakes
