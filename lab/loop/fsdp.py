"""The lab's reduce-scatters in an FSDP2 model of the user's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lab.distributed.comm import Traffic
from lab.distributed.replicas import is_sharded
from lab.exchange.base import Exchange
from lab.loop.settings import compose
from lab.settings.config import ConfigError, build
from lab.sync.fsdp import set_reduce_scatter
from lab.sync.fsdp_units import WholeGradients, require_scattered
from lab.sync.owner import KEY, Owner, require_state


class ReduceScatters:
    """The state and counts that the reduce-scatters of a model's FSDP modules share.

    Attributes:
        traffic: payload bytes and messages of this rank's reduce-scatters so far.

    Raises:
        ValueError: see lab.sync.fsdp.set_reduce_scatter.
    """

    def __init__(self, model: nn.Module, exchange: Exchange, settings: Mapping[str, Any]) -> None:
        self.traffic = Traffic()
        self._model, self._exchange, self._settings = model, exchange, settings
        require_scattered(model, exchange)
        set_reduce_scatter(model, exchange, self.traffic)
        WholeGradients(model)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's residuals, if the exchange has any, and whose they are."""
        return {**self._exchange.state_dict(), KEY: self._owner.mark()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a result of `state_dict` on the same rank of as many ranks.

        Raises:
            ValueError: it is of another exchange, or see Owner.check.
        """
        require_state(state)
        kept = {key: value for key, value in state.items() if key != KEY}
        self._owner.check(state.get(KEY), kept)
        self._exchange.resume(kept, next(self._model.parameters()).device)

    @property
    def _owner(self) -> Owner:
        """Residuals are laid out for the mesh's ranks, so its shape is one of the settings."""
        sharded: Any = next(filter(is_sharded, self._model.parameters()))
        mesh: DeviceMesh = sharded.device_mesh
        settings = {**self._settings, "mesh": list(mesh.shape)}
        rank = mesh.mesh.flatten().tolist().index(mesh.get_rank())
        return Owner(self._model, self._exchange, settings, rank, mesh.size())


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
        settings: Any = OmegaConf.to_container(config.exchange, resolve=True)
        return ReduceScatters(model, build(config.exchange), settings)
    except ValueError as error:
        raise ConfigError(str(error)) from None
