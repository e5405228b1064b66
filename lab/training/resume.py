"""What a run takes over from a checkpoint, and when it must not."""

from __future__ import annotations

from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor

from lab.settings.config import Settings


def check_fit(config: Settings, shared: dict[str, Any], owns: list[dict[str, Any]]) -> None:
    """Refuse a checkpoint whose tensors would mean something else in a run with these settings.

    Momentum and residuals lie in memory order; residuals belong to the exchange that left them.

    Args:
        shared, owns: see Trainer.load_state.

    Raises:
        ValueError: it is such a one.
    """
    if shared["channels_last"] != config.channels_last:
        raise ValueError(
            f"channels_last={config.channels_last}: the checkpoint was written with "
            f"channels_last={shared['channels_last']}; set the same"
        )
    then, now = shared["exchange"], OmegaConf.to_container(config.exchange)
    if owns[0]["exchange"] and then != now:
        raise ValueError(f"exchange={now}: the checkpoint holds residuals of exchange={then}")


def replica_of(
    rank: int | None, size: int, shared: dict[str, Any], owns: list[dict[str, Any]]
) -> dict[str, Any]:
    """Weights and momentum to go on with.

    Where ranks had their own and this run cannot give each its own back (their number is another,
    or all must have the same), that is the mean over all of them.

    Args:
        rank: of `size` ranks that may each have its own; None: all have the same.
        shared, owns: see Trainer.load_state.
    """
    if "model" in shared:
        return shared
    if rank is not None and size == len(owns):
        return owns[rank]
    return mean_state([{key: own[key] for key in ("model", "optimizer")} for own in owns])


def mean_state(states: list[Any]) -> Any:
    """`states` of several ranks in one: tensors averaged, by key; of all else, the first's."""
    first = states[0]
    if isinstance(first, dict):
        return {key: mean_state([state[key] for state in states]) for key in first}
    if isinstance(first, Tensor):
        return torch.empty_like(first).copy_(torch.stack(states).double().mean(dim=0))
    return first
