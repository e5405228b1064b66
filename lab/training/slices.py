"""The optimizer's state in a checkpoint: whole, or in slices, for any number of ranks.

A slice is of a parameter's values in memory order, and so is its state: tensors of as many values.
Other state, as a count of steps, is equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lab.distributed.sharded import like
from lab.sync.base import Shard

State = dict[str, Any]
Named = Iterable[tuple[str, nn.Parameter]]


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


def load(
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
