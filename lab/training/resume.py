"""Collect a trainer's state for a checkpoint, and restore it in another run.

The optimizer's state is whole, or in slices, for any number of ranks. A slice is of a parameter's
values in memory order, and so is its state: tensors of as many values. Other state, as a count of
steps, is equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.optim import Optimizer

from lab.distributed.replicas import broadcast_buffers, like, local, whole
from lab.exchange.layout import named
from lab.settings.config import Settings
from lab.settings.names import by_class
from lab.sync.base import Shard
from lab.training.trainer import Progress, Trainer, overflow, total_steps

State = dict[str, Any]
Named = Iterable[tuple[str, nn.Parameter]]  # parameters


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
        names = names_of(trainer.optimizer, named(model).items())
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
        by_rank.update(slices_of(trainer.optimizer, sync.shards))
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
        load_optimizer(trainer.optimizer, parameters, trainer.sync.shards, replica, ranks)
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


def names_of(optimizer: Optimizer, named: Named) -> list[str]:
    """List the parameters of an optimizer, as its `state_dict` counts them."""
    name_of = {id(parameter): name for name, parameter in named}
    return [name_of[id(p)] for group in optimizer.param_groups for p in group["params"]]


def slices_of(optimizer: Optimizer, shards: Mapping[str, Shard]) -> State:
    """Collect the state of this rank's slices, by parameter name."""
    slices = {
        name: {"start": s.start, "stop": s.stop, "state": dict(optimizer.state[s.values])}
        for name, s in shards.items()
    }
    return {"slices": slices, "groups": optimizer.state_dict()["param_groups"]}


def load_optimizer(
    optimizer: Optimizer,
    named: Named,
    shards: Mapping[str, Shard],
    whole: State,
    ranks: list[State],
) -> None:
    """Continue from a checkpoint of any strategy on any number of ranks.

    Args:
        optimizer: of the parameters `named`, or of this rank's `shards` of them.
        whole: has "optimizer", a `state_dict`, and "names" of its parameters, unless `ranks` have
            slices.
        ranks: the part of each rank that wrote the checkpoint.

    Raises:
        ValueError: the state is of other parameters.
    """
    parameters = dict(named)
    if "slices" in ranks[0]:
        flat, groups = _joined([rank["slices"] for rank in ranks]), ranks[0]["groups"]
    elif shards:
        flat, groups = _flattened(whole, parameters), whole["optimizer"]["param_groups"]
    else:
        _load_placed(optimizer, parameters, whole["optimizer"])
        return
    if shards:
        parameters = {name: shard.values for name, shard in shards.items()}
    spans = {name: slice(shard.start, shard.stop) for name, shard in shards.items()}
    names = names_of(optimizer, parameters.items())
    if missing := set(names) - set(flat):
        raise ValueError(f"no state of {', '.join(sorted(missing))}")
    state = {
        number: _cut(flat[name], spans.get(name, slice(None)), parameters[name])
        for number, name in enumerate(names)
        if flat[name]
    }
    saved = {"state": state, "param_groups": _groups(optimizer, groups)}
    _load_placed(optimizer, parameters, saved)


def _load_placed(
    optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], saved: State
) -> None:
    """Load a `state_dict` of whole tensors, each sharded if its parameter is."""
    placed = {
        number: {key: like(v, parameters[name]) for key, v in saved["state"][number].items()}
        for number, name in enumerate(names_of(optimizer, parameters.items()))
        if number in saved["state"]
    }
    optimizer.load_state_dict({**saved, "state": placed})


def _joined(ranks: list[State]) -> dict[str, State]:
    """Join the slices of all ranks: a parameter's whole state, tensors flat, by name."""
    pieces: dict[str, list[State]] = {}
    for rank in ranks:
        for name, piece in rank.items():
            pieces.setdefault(name, []).append(piece)
    return {name: _join(sorted(each, key=lambda p: p["start"])) for name, each in pieces.items()}


def _join(pieces: list[State]) -> State:
    return {
        key: torch.cat([piece["state"][key].reshape(-1) for piece in pieces])
        if isinstance(value, Tensor) and value.dim()
        else value
        for key, value in pieces[0]["state"].items()
    }


def _flattened(whole: State, parameters: Mapping[str, nn.Parameter]) -> dict[str, State]:
    """Return the same of a checkpoint in which one rank's optimizer had whole parameters."""
    if "names" not in whole:
        raise ValueError("an earlier version wrote no names of parameters")
    states = whole["optimizer"]["state"]
    return {
        name: {key: _flat(value, parameters[name]) for key, value in states.get(n, {}).items()}
        for n, name in enumerate(whole["names"])
    }


def _flat(value: Any, parameter: nn.Parameter) -> Any:
    """Return a tensor of `parameter`'s shape in the order of its memory; others as they are."""
    if not isinstance(value, Tensor) or not value.dim() or value.shape != parameter.shape:
        return value
    laid_out = value.new_empty_strided(parameter.shape, parameter.stride()).copy_(value)
    return laid_out.as_strided((laid_out.numel(),), (1,))


def _cut(state: State, span: slice, model: nn.Parameter) -> State:
    """Return `span` of flat state, in the layout of `model`."""

    def cut(value: Tensor) -> Tensor:
        laid_out = value.new_empty_strided(model.shape, model.stride())
        laid_out.as_strided((laid_out.numel(),), (1,)).copy_(value[span])
        return laid_out

    return {k: cut(v) if isinstance(v, Tensor) and v.dim() else v for k, v in state.items()}


def _groups(optimizer: Optimizer, saved: list[State]) -> list[State]:
    """Return this optimizer's groups with what `saved` ones hold besides parameters.

    A rank may lack a group of which it has no slice; a run sets its own hyperparameters anyway.
    """
    own = optimizer.state_dict()["param_groups"]
    return [
        {**saved[min(number, len(saved) - 1)], "params": group["params"]}
        for number, group in enumerate(own)
    ]
