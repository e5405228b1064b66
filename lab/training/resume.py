"""Collect a trainer's state for a checkpoint, and restore it in another run."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor

from lab.distributed.replicas import broadcast_buffers
from lab.distributed.sharded import like, local, whole
from lab.exchange.layout import named
from lab.settings.config import Settings
from lab.settings.names import by_class
from lab.training import slices
from lab.training.losses import overflow
from lab.training.progress import Progress, total_steps
from lab.training.trainer import Trainer

State = dict[str, Any]


def state_of(trainer: Trainer) -> tuple[State, State]:
    """Collect a checkpoint's content: the part that all ranks share, and this rank's part.

    Raises:
        FloatingPointError: it has non-finite weights or gradients.
    """
    trainer.pause()
    model, sync, device = trainer.model, trainer.sync, trainer.world.device
    broadcast_buffers(model, trainer.world)
    sync_state = sync.state_dict()
    _refuse_spoiled(trainer, sync_state)
    replica: State = {"model": whole(model.state_dict())}
    if not sync.shards:
        names = slices.names_of(trainer.optimizer, named(model).items())
        replica |= {"optimizer": whole(trainer.optimizer.state_dict()), "names": names}
    shared = {
        "sync": sync_state,
        "progress": asdict(trainer.progress) | {"seconds": trainer.training_seconds()},
        "loss_scale": trainer.loss_scale and trainer.loss_scale.state_dict(),
        "channels_last": trainer.config.channels_last,
        "exchange": OmegaConf.to_container(trainer.config.exchange),
        "optim": trainer.config.optim["_target_"],
    }
    by_rank = {"exchange": sync.exchange.state_dict(), "rng": torch.get_rng_state()}
    if device.type == "cuda":
        by_rank["cuda_rng"] = torch.cuda.get_rng_state(device)
    (by_rank if sync.pattern.own_replicas else shared).update(replica)
    if sync.shards:
        by_rank.update(slices.slices_of(trainer.optimizer, sync.shards))
    return shared, by_rank


def restore(trainer: Trainer, shared: State, ranks: list[State]) -> None:
    """Continue from the results of `state_of` on every rank of the same or another number.

    Args:
        shared: the part that all ranks share.
        ranks: the part of each rank that wrote the checkpoint.

    Raises:
        ValueError: the checkpoint is of another model or strategy.
    """
    check_fit(trainer.config, shared, ranks)
    rank = trainer.world.rank if trainer.sync.pattern.own_replicas else None
    replica = replica_of(rank, trainer.world.size, shared, ranks)
    try:
        own, weights = trainer.model.state_dict(), replica["model"]
        trainer.model.load_state_dict({n: like(w, own.get(n, w)) for n, w in weights.items()})
        parameters = named(trainer.model).items()
        slices.load(trainer.optimizer, parameters, trainer.sync.shards, replica, ranks)
    except (RuntimeError, ValueError):
        raise ValueError(
            f"resume={trainer.config.resume}: the checkpoint is of another model; use the same "
            "model, transform and data"
        ) from None
    trainer.progress = _progress(trainer, shared["progress"])
    trainer.first_step = trainer.progress.step
    if trainer.loss_scale and shared["loss_scale"]:
        trainer.loss_scale.load_state_dict(shared["loss_scale"])
    trainer.sync.load_state_dict(_to(shared["sync"], trainer.world.device))
    _restore_rank(trainer, ranks)


def check_fit(config: Settings, shared: State, ranks: list[State]) -> None:
    """Refuse a checkpoint whose tensors would mean something else in a run with these settings.

    Momentum and residuals lie in memory order; residuals belong to the exchange that left them.

    Args:
        shared, ranks: see `restore`.

    Raises:
        ValueError: its memory layout, its optimizer or its exchange differs.
    """
    if shared["channels_last"] != config.channels_last:
        raise ValueError(
            f"channels_last={config.channels_last}: the checkpoint was written with "
            f"channels_last={shared['channels_last']}; set the same"
        )
    optim = config.optim["_target_"]
    if shared.get("optim", optim) != optim:  # earlier checkpoints do not say
        raise ValueError(
            f"optim={optim}: the checkpoint holds the state of {shared['optim']}; set the same"
        )
    now = by_class(OmegaConf.to_container(config.exchange))
    then = by_class(shared["exchange"])
    if ranks[0]["exchange"] and then != now:
        if then["_target_"] != now["_target_"]:
            then, now = then["_target_"], now["_target_"]
        raise ValueError(f"exchange={now}: the checkpoint holds residuals of exchange={then}")


def replica_of(rank: int | None, size: int, shared: State, ranks: list[State]) -> State:
    """Choose the weights and momentum to go on with.

    If ranks had their own and this run cannot restore each (their number changed, or all must be
    equal), that is the mean over all of them.

    Args: rank: one of `size` ranks that each have their own; None: all have the same.
        shared, ranks: see `restore`.
    """
    if "model" in shared:
        return shared
    if rank is not None and size == len(ranks):
        return ranks[rank]
    keys = [key for key in ("model", "optimizer", "names") if key in ranks[0]]
    return mean_state([{key: state[key] for key in keys} for state in ranks])


def _progress(trainer: Trainer, saved: State) -> Progress:
    """Return the saved progress, with this run's total number of steps."""
    steps = saved["step"], saved["samples"]
    if any(type(count) is not int or count < 0 for count in steps):
        raise ValueError(
            f"resume: step={steps[0]} samples={steps[1]}: must be whole numbers from 0"
        )
    num_train, batch_size = trainer.data.num_train, trainer.batch_size
    total = total_steps(trainer.config, num_train, batch_size, saved["step"], saved["samples"])
    return Progress(**{**saved, "total_steps": total})


def _restore_rank(trainer: Trainer, ranks: list[State]) -> None:
    world, exchange = trainer.world, trainer.sync.exchange
    states = [state["exchange"] for state in ranks]
    same_size = world.size == len(ranks)
    if same_size:
        torch.set_rng_state(ranks[world.rank]["rng"])
        if "cuda_rng" in ranks[world.rank] and world.device.type == "cuda":
            torch.cuda.set_rng_state(ranks[world.rank]["cuda_rng"], world.device)
    if same_size and exchange.continues(states[world.rank]):
        state = states[world.rank]
    else:
        state = exchange.redistribute(states, world.rank, world.size) if states[0] else {}
    if state:
        exchange.load_state_dict(_to(state, world.device))


def _refuse_spoiled(trainer: Trainer, sync_state: dict[str, dict[str, Tensor]]) -> None:
    """Raise if weights or the sync's tensors are not finite, even if no loss was."""
    kept = (pair for tensors in sync_state.values() for pair in tensors.items())
    tensors = [*trainer.model.named_parameters(), *kept]
    if not all(local(tensor).isfinite().all() for _, tensor in tensors):
        raise overflow(trainer.progress.step - 1, tensors)


def _to(state: State, device: torch.device) -> State:
    return {key: {n: v.to(device) for n, v in tensors.items()} for key, tensors in state.items()}


def mean_state(states: list[Any]) -> Any:
    """Merge the `states` of several ranks: average tensors, keep the first's other values."""
    first = states[0]
    if isinstance(first, dict):
        return {key: mean_state([state[key] for state in states]) for key in first}
    if isinstance(first, Tensor):
        return torch.empty_like(first).copy_(torch.stack(states).double().mean(dim=0))
    return first
