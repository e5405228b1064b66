"""Strategies and exchanges for the generic tests, and the facts that those tests cannot derive.

The tests find strategies and exchanges in conf/, and other facts in classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lab.settings.config import build, choices_of, load
from lab.settings.files import read_file
from lab.simulate.costs import payload_bytes
from lab.simulate.hardware import Hardware, Link
from lab.simulate.network import Network

EXCHANGES = choices_of("exchange")
ALL_STRATEGIES = choices_of("strategy")
# Strategies over torch; test_horovod.py has the other one.
STRATEGIES = [strategy for strategy in ALL_STRATEGIES if strategy != "horovod"]

# Strategies with an exact exchange of a library's, and all those on a library's schedule.
EXACT_LIBRARIES = ("ddp", "fsdp", "hsdp", "horovod")
LIBRARIES = (*EXACT_LIBRARIES, "zeropp")
# Strategies that decide by the clock, so that two runs may differ.
BY_THE_CLOCK = ("auto",)
# Exchanges that differ from step to step; test_schedule.py tells what each step sends. Where a test
# makes one without a run, its phases end after these steps.
OVER_TIME = {"schedule": ("until=[1,2]",)}
# Strategies that compress between nodes alone, and so nothing where all ranks are on one.
BETWEEN_NODES = ("hierarchical_onebit",)
# More settings for a run that is resumed at step 7: local strategies are then within a round, the
# first or, with an outer momentum, the fourth; `auto` has decided; a gradient or a fragment is
# under way.
RESUMED = {
    "auto": ("exchange.among=[onebit]", "exchange.rounds=1"),
    "diloco": ("sync.every=2",),
    "streaming_diloco": ("sync.every=4", "sync.delay=2"),
    "des_loc": ("sync.every=2", "sync.first_every=3", "sync.second_every=6"),
    "cntk": ("sync.double_buffer=true",),
    "onebit_adam": ("exchange.freeze_at=4", "exchange.eps=0.1"),
    "onebit_lamb": ("exchange.freeze_at=4", "exchange.eps=0.1"),
    "zero_one_adam": (
        "exchange.updates_per_interval=2",
        "exchange.longest_interval=2",
        "exchange.eps=0.1",
    ),
    "priority": ("sync.trials=0", "sync.chunk_mb=0.05"),
}
# More settings of exchanges that begin exactly, so that the second step is as all later ones.
STEADY = {
    "onebit_adam": ("exchange.freeze_at=1",),
    "onebit_lamb": ("exchange.freeze_at=1",),
    "zero_one_adam": ("exchange.updates_per_interval=1", "exchange.longest_interval=1"),
}
# More settings where bytes are counted: at rank 2 it sends so little that TCP's headers show.
COUNTED = {"powersgd": ("exchange.rank=32",), **STEADY}
# More settings of an exchange where tensors have a few thousand values, so that it compresses them.
COMPRESSES_LITTLE = {
    "int8": ("block_size=64",),
    "int4": ("block_size=16",),
    "randomk": ("ratio=0.05",),
    "signsgd_ef": ("min_values=100",),
    "topk": ("ratio=0.05",),
}
# Times the card's memory that an exchange may allocate: a card knows neither the dtype of Muon's
# products, which is float32 on CPUs, nor how long Dion's P is.
TEMPORARIES = {"muon": 1.5, "dion": 1.1}


def exchange_node(name: str, *settings: str) -> DictConfig:
    """Return the settings of an exchange; Hydra takes a tenth of a second, which few files need."""
    content = read_file("exchange", name)
    if settings or "defaults" in content or "${" in str(content):
        return load([f"exchange={name}", *settings]).exchange
    return OmegaConf.create(content)


def exchange_settings(name: str, *settings: str) -> dict[str, Any]:
    """Return the composed settings of an exchange."""
    node = OmegaConf.to_container(exchange_node(name, *settings), resolve=True)
    assert isinstance(node, dict)
    return {str(key): value for key, value in node.items()}


def maker(name: str, *settings: str, **arguments: Any) -> Callable[[], Any]:
    """A function that makes an exchange, in any thread: Hydra composes in one alone.

    Args:
        settings: of the exchange, as `ratio=0.05`.
        arguments: of its class, in the place of what is set.
    """
    given = (*OVER_TIME.get(name, ()), *settings)
    node = exchange_node(name, *(f"exchange.{setting}" for setting in given))
    return partial(build, node, **arguments)


@cache
def keeps_replicas_equal(strategy: str) -> bool:
    """Return whether ranks end with the same weights; other strategies are for timing only."""
    config = load([f"strategy={strategy}"])
    return strategy in LIBRARIES or build(config.exchange).keeps_replicas_equal


@cache
def is_exact(strategy: str) -> bool:
    """Return whether a strategy equals one process on the whole batch, up to rounding.

    All ranks are on one node.
    """
    if strategy in (*EXACT_LIBRARIES, *BETWEEN_NODES):
        return True
    exchange = build(load([f"strategy={strategy}"]).exchange)
    return exchange.exact and steps_of_a_round(strategy) == 1


@cache
def steps_of_a_round(strategy: str) -> int:
    """Return the steps from one exchange to the next."""
    return load([f"strategy={strategy}"]).sync.get("every", 1)


@cache
def bytes_per_value(exchange: str) -> float:
    """Bytes that the busier of two ranks sends for a value of a gradient, by its cost.

    No mean is exact for less than 4, and nothing that compresses sends as many.
    """
    sent = payload_bytes([(512, 2048)], exchange_settings(exchange), Network(LINKS, 2))
    return sent / (512 * 2048)


# Payload bytes are the same over any links.
LINKS = Hardware("any", "made up", "gloo", 1, None, Link(0.0, 1e9), math.inf)
# Exchanges that move anything, and leave the same bits whenever they are run.
REPEATABLE = [
    exchange
    for exchange in EXCHANGES
    if bytes_per_value(exchange) > 0 and exchange not in (*BY_THE_CLOCK, *OVER_TIME)
]
# Exchanges that leave a direction, no mean: only optim=direction applies it.
DIRECTIONS = [exchange for exchange in REPEATABLE if maker(exchange)().delivers == "direction"]
MEANS = [exchange for exchange in REPEATABLE if exchange not in DIRECTIONS]
EXACT = [exchange for exchange in MEANS if bytes_per_value(exchange) >= 4]
COMPRESSING = [exchange for exchange in MEANS if bytes_per_value(exchange) < 4]
