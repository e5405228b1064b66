"""Strategies and exchanges for the generic tests, and the facts that those tests cannot derive.

The tests find strategies and exchanges in conf/, and other facts in classes and cost cards.
"""

from __future__ import annotations

import math
from typing import Any

from omegaconf import OmegaConf

from lab.settings.config import build, choices_of, load
from lab.simulate.hardware import Hardware, Link

EXCHANGES = choices_of("exchange")
ALL_STRATEGIES = choices_of("strategy")
# Strategies over torch; test_horovod.py has the other one.
STRATEGIES = [strategy for strategy in ALL_STRATEGIES if strategy != "horovod"]

# Strategies with an exact exchange of their own, for which the lab has no cost card.
LIBRARIES = ("ddp", "horovod")
# Strategies that decide by the clock, so that two runs may differ.
BY_THE_CLOCK = ("auto",)
# More settings for a run that is resumed at step 7: local strategies are then within a round, the
# first or, with an outer momentum, the fourth; `auto` has decided; a gradient is under way.
RESUMED = {
    "diloco": ("sync.every=2",),
    "auto": ("exchange.trials=1",),
    "cntk": ("sync.double_buffer=true",),
}
# More settings where bytes are counted: at rank 2 it sends so little that TCP's headers show.
COUNTED = {"powersgd": ("exchange.rank=32",)}


def exchange_settings(name: str, *settings: str) -> dict[str, Any]:
    """Return the composed settings of an exchange."""
    node = OmegaConf.to_container(load([f"exchange={name}", *settings]).exchange, resolve=True)
    assert isinstance(node, dict)
    return {str(key): value for key, value in node.items()}


def keeps_replicas_equal(strategy: str) -> bool:
    """Return whether ranks end with the same weights; other strategies are for timing only."""
    config = load([f"strategy={strategy}"])
    return strategy in LIBRARIES or build(config.exchange).keeps_replicas_equal


def is_exact(strategy: str) -> bool:
    """Return whether a strategy equals one process on the whole batch, up to rounding."""
    if strategy in LIBRARIES:
        return True
    exchange = build(load([f"strategy={strategy}"]).exchange)
    return exchange.exact and steps_of_a_round(strategy) == 1


def steps_of_a_round(strategy: str) -> int:
    """Return the steps from one exchange to the next."""
    return load([f"strategy={strategy}"]).sync.get("every", 1)


def _repeatable(exchange: str) -> bool:
    delivers_means = build(load([f"exchange={exchange}"]).exchange).keeps_replicas_equal
    return delivers_means and exchange not in BY_THE_CLOCK


# Exchanges that deliver a mean, with the same bits in every run.
REPEATABLE = [exchange for exchange in EXCHANGES if _repeatable(exchange)]
# Payload bytes are the same over any links.
LINKS = Hardware("any", "made up", "gloo", 1, None, Link(0.0, 1e9), math.inf)
