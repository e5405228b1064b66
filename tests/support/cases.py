"""Which strategies and exchanges the generic tests run on, and what those tests cannot derive.

The tests find both in conf/, and their facts in classes and cost cards.
"""

from __future__ import annotations

import math
from typing import Any

from omegaconf import OmegaConf

from lab.settings.config import build, choices_of, load
from lab.simulate.hardware import Hardware, Link

EXCHANGES = choices_of("exchange")
ALL_STRATEGIES = choices_of("strategy")
# Those over torch; test_horovod.py has the other.
STRATEGIES = [strategy for strategy in ALL_STRATEGIES if strategy != "horovod"]

# Bring an exchange of their own, whose bytes no card of the lab says; exact.
LIBRARIES = ("ddp", "horovod")
# Decide by the clock, so that two runs may do different things.
BY_THE_CLOCK = ("auto",)
# More settings for a run that is resumed at step 7: local strategies are in a round then, the first
# one or, with an outer momentum, the fourth; `auto` has decided; a gradient is under way.
RESUMED = {
    "diloco": ("sync.every=2",),
    "auto": ("exchange.trials=1",),
    "cntk": ("sync.double_buffer=true",),
}
# More settings where bytes are counted: of rank 2 it sends so little that TCP's headers show.
COUNTED = {"powersgd": ("exchange.rank=32",)}


def exchange_settings(name: str, *settings: str) -> dict[str, Any]:
    """The composed settings of an exchange."""
    node = OmegaConf.to_container(load([f"exchange={name}", *settings]).exchange, resolve=True)
    assert isinstance(node, dict)
    return {str(key): value for key, value in node.items()}


def keeps_replicas_equal(strategy: str) -> bool:
    """Whether ranks end with the same weights; others are for timing alone."""
    config = load([f"strategy={strategy}"])
    return strategy in LIBRARIES or build(config.exchange).keeps_replicas_equal


def is_exact(strategy: str) -> bool:
    """Whether it ends with the weights of one process on the whole batch, up to rounding."""
    if strategy in LIBRARIES:
        return True
    exchange = build(load([f"strategy={strategy}"]).exchange)
    return exchange.exact and steps_of_a_round(strategy) == 1


def steps_of_a_round(strategy: str) -> int:
    """Steps from one exchange to the next."""
    return load([f"strategy={strategy}"]).sync.get("every", 1)


def _repeatable(exchange: str) -> bool:
    delivers_means = build(load([f"exchange={exchange}"]).exchange).keeps_replicas_equal
    return delivers_means and exchange not in BY_THE_CLOCK


# Exchanges that deliver a mean, and the same bits whenever they are run.
REPEATABLE = [exchange for exchange in EXCHANGES if _repeatable(exchange)]
# Payload bytes are the same over any links.
LINKS = Hardware("any", "made up", "gloo", 1, None, Link(0.0, 1e9), math.inf)
