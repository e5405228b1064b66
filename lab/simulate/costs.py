"""Costs of an exchange as configured: its stages, whole or of a reduce-scatter, bytes, memory.

The classes in lab/exchange say them, or their code is recorded (lab.simulate.recorded).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Any, cast

from omegaconf import DictConfig, OmegaConf

from lab.exchange.cost import Shape, Sizes
from lab.settings.config import build, choices_of
from lab.settings.files import read_file
from lab.settings.names import class_name
from lab.settings.own_code import targets
from lab.simulate.load import Load, Settings, Stage, class_of
from lab.simulate.network import Network

if TYPE_CHECKING:
    from lab.exchange.base import Exchange

GROUPS = ("exchange", "path", "codec", "memory")  # whose choices are parts of an exchange


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


def scatter_of(exchange: Settings) -> Callable[[Load], object]:
    """Return what appends the stages of a reduce-scatter to a Load of padded shapes.

    Args:
        exchange: NoExchange: torch's own.

    Raises:
        ValueError: the exchange has no reduce-scatter.
    """
    from lab.exchange import scatter  # with torch, which settings and help do not need
    from lab.exchange.allreduce import AllReduce

    if class_of(exchange) == "NoExchange":
        return _of_torch
    made = exchange_of(exchange)
    scatter.scatter_of(made)
    if isinstance(made, AllReduce):
        return partial(_exact, made.exact)
    return partial(Load.add, exchange=made, part="scatter")


def _of_torch(load: Load) -> None:
    """Over Gloo it is an all-reduce, of which each rank keeps a part."""
    if load.network.hardware.library == "gloo":
        load.wire(load.network.all_reduce(load.num_bytes))
    else:
        load.wire(load.network.reduce_scatter(load.num_bytes / load.N))


def _exact(exact: bool, load: Load) -> None:
    part = load.num_bytes / load.N
    if exact:
        load.wire(load.network.reduce_scatter(part))
        return
    load.codec(1.5 * load.num_bytes)
    load.wire(load.network.all_to_all(part / 2))
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
    needs = exchange_of(exchange).memory_bytes(sizes)
    return max(4 * sizes.gathered, needs.scratch) + needs.kept


@lru_cache(maxsize=1000)
def _built(text: str) -> Exchange:
    settings = _with_classes_of_today(json.loads(text))
    return build(cast(DictConfig, OmegaConf.create(settings)))


def _with_classes_of_today(value: Any) -> Any:
    """Replace the paths of classes by those that they have now; records have had others."""
    if isinstance(value, Mapping):
        found = {key: _with_classes_of_today(each) for key, each in value.items()}
        if "_target_" in found:
            found["_target_"] = _path_of(str(found["_target_"]))
        return found
    if isinstance(value, str) and "${" in value:  # would be looked up here
        raise ValueError(f"exchange: {value}: must be a plain value")
    return [_with_classes_of_today(each) for each in value] if isinstance(value, list) else value


def _path_of(path: str) -> str:
    if path.startswith("lab."):
        known = _own_paths()
        if path in known.values() or (path := known.get(class_name(path), path)) in known.values():
            return path
        allowed = ", ".join(choices_of("exchange"))
        raise ValueError(f"exchange={class_name(path)}: is no exchange; allowed are {allowed}")
    from lab.codec.base import Codec
    from lab.exchange.base import Exchange
    from lab.exchange.memory import Memory

    module, _, name = path.replace(":", ".").rpartition(".")
    found = getattr(sys.modules.get(module), name, None)
    if isinstance(found, type) and issubclass(found, Exchange | Codec | Memory):
        return path
    raise ValueError(f"exchange={path}: is not among the lab's, and its code is not loaded here")


@cache
def _own_paths() -> dict[str, str]:
    """Return the paths of the lab's exchanges and their parts, by class name, exchanges first."""
    paths: dict[str, str] = {}
    for group in GROUPS:
        for path in targets([dict(read_file(group, choice)) for choice in choices_of(group)]):
            if path not in paths.values():
                name = class_name(path)
                paths[name if name not in paths else path] = path
    return paths
