"""The lab's reduce-scatters in an FSDP2 model of the user's own."""

from __future__ import annotations

from typing import Any

from torch import nn

from lab.distributed.comm import Traffic
from lab.exchange.base import Exchange
from lab.loop.settings import compose
from lab.settings.config import ConfigError, build
from lab.sync.fsdp_gradients import WholeGradients
from lab.sync.fsdp_rules import require_scattered
from lab.sync.fsdp_scatter import set_reduce_scatter


class ReduceScatters:
    """The state and counts that the reduce-scatters of a model's FSDP modules share.

    Attributes:
        traffic: payload bytes and messages of this rank's reduce-scatters so far.

    Raises:
        ValueError: see lab.sync.fsdp_scatter.set_reduce_scatter.
    """

    def __init__(self, model: nn.Module, exchange: Exchange) -> None:
        self.traffic = Traffic()
        self._exchange, self._device = exchange, next(model.parameters()).device
        require_scattered(model, exchange)
        set_reduce_scatter(model, exchange, self.traffic)
        WholeGradients(model)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's residuals; {} of an exchange without any."""
        return self._exchange.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a result of `state_dict` on the same rank of as many ranks."""
        self._exchange.resume(state, self._device)


def fsdp_reduce_scatter(
    model: nn.Module, exchange: str = "allreduce", **overrides: Any
) -> ReduceScatters:
    """Let each module of `model` that FSDP2 shards scatter its gradients by the lab.

    Call it after the last fully_shard, before the first backward. FSDP's own groups carry it.

    Args:
        exchange: "allreduce" (exact), "bf16", "fp16", "int8", "int4" or "onebit", whose first half
            it is.
        overrides: settings by dotted key: `**{"exchange.block_size": 512}`.

    Raises:
        ConfigError: a setting, or a model without FSDP modules.
    """
    config = compose(exchange, overrides)
    try:
        return ReduceScatters(model, build(config.exchange))
    except ValueError as error:
        raise ConfigError(str(error)) from None
