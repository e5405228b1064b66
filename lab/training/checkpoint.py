"""Checkpoints: whole or absent, and exact for every rank; and a trainer restored from one.

    step_000100/shared.pt       what all ranks share: weights, optimizer, position in the data
    step_000100/rank_000.pt     what is this rank's own: residuals, random state; and weights and
                                optimizer where ranks exchange every so many steps alone
    step_000100/DONE            sizes and hashes of the files above, written last

A checkpoint is written under a temporary name and renamed when DONE is on disk, so one that a crash
cut short is never found.

The optimizer's state is whole, or in slices, for any number of ranks. A slice is of a parameter's
values in memory order, and so is its state: tensors of as many values. Other state, as a count of
steps, is equal on all ranks.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import re
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torch.optim import Optimizer

from lab.distributed.replicas import broadcast_buffers, gathered, like, local
from lab.distributed.world import World
from lab.exchange.base import kept_state
from lab.exchange.layout import named, trainable
from lab.record.schema import decode
from lab.settings.config import RunSettings
from lab.settings.errors import ConfigError, one_line
from lab.settings.names import by_class
from lab.settings.storage import read_json, write_atomically, write_json
from lab.sync.base import Shard
from lab.sync.refusals import small_copies, step_at_random
from lab.training.optim import Optim
from lab.training.trainer import Progress, Trainer, overflow, total_steps

KEEP = 2  # newest checkpoints that stay on disk: if the last one is damaged, there is another
NAME = re.compile(r"step_(\d{6,})")  # what lies beside under other names is the user's
State = dict[str, Any]
Named = Iterable[tuple[str, nn.Parameter]]  # parameters


@dataclass(frozen=True)
class DoneFile:
    """The file DONE.

    Attributes:
        files: SHA-256 by name.
        sizes: bytes by name; empty: an older version wrote it.
    """

    world_size: int
    files: dict[str, str]
    sizes: dict[str, int] = field(default_factory=dict[str, int])


def save(root: Path, step: int, shared: dict[str, Any], own: dict[str, Any], world: World) -> None:
    """Write a checkpoint. All ranks call this after the same step.

    Args:
        shared: state that is equal on all ranks; rank 0's is written.
        own: this rank's state.
    """
    unfinished = root / f".step_{step:06d}"
    if world.rank == 0:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    world.barrier()
    states = {f"rank_{world.rank:03d}.pt": own} | ({} if world.rank else {"shared.pt": shared})
    try:
        for name, state in states.items():
            _write(unfinished / name, state)
    except OSError:  # a full disk, which shall have room for the record
        for name in states:
            (unfinished / name).unlink(missing_ok=True)
        raise
    world.barrier()
    if world.rank == 0:
        files = sorted(unfinished.glob("*.pt"))
        sizes = {path.name: path.stat().st_size for path in files}
        done = DoneFile(world.size, {path.name: _digest(path) for path in files}, sizes)
        write_json(unfinished / "DONE", asdict(done))
        final, replaced = root / f"step_{step:06d}", root / f".replaced_{step:06d}"
        if final.exists():  # of the same step; it stays until the new one is complete
            final.replace(replaced)
        unfinished.replace(final)
        _sync(root)
        shutil.rmtree(replaced, ignore_errors=True)
        for old in _complete(root)[:-KEEP]:
            if not old.is_symlink():  # the user's, to a larger disk perhaps
                shutil.rmtree(old, ignore_errors=True)
    world.barrier()


def newest(root: Path) -> Path | None:
    """Return the newest whole checkpoint under `root`; None if there is none.

    A damaged one is passed over with a line on stderr: a job that is started again must go on.

    Raises: ValueError: there is none but damaged ones.
    """
    complete = _complete(root)
    for path in reversed(complete):
        try:
            _names_in(path)
            return path
        except ValueError as error:
            if path == complete[0]:
                raise
            print(f"{error}; trying the previous checkpoint", file=sys.stderr)
    return None


def load(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Load a checkpoint: the shared part, and every rank's part in rank order.

    Raises: ValueError: `path` is not a complete checkpoint, or one of its files was changed.
    """
    names = _names_in(path)
    return _read(path / "shared.pt"), [_read(path / name) for name in names]


def _names_in(path: Path) -> list[str]:
    """Return the files of ranks in a checkpoint, after checking that all are as DONE says."""
    if not (path / "DONE").is_file():
        raise ValueError(
            f"resume={path}: not a complete checkpoint; use auto, or a directory "
            "checkpoints/step_… that contains DONE"
        )
    try:
        done = decode(DoneFile, read_json(path / "DONE"), "")
        names = [f"rank_{rank:03d}.pt" for rank in range(len(done.files) - 1)]
        if {"shared.pt", *names} != {*done.files} or len(names) != done.world_size:
            raise ValueError("the files that DONE lists do not match its number of ranks")
        damaged = [name for name in done.files if _was_changed(path / name, done)]
    except (OSError, ValueError) as error:
        raise ValueError(f"resume={path}: corrupt checkpoint: {error}") from None
    if damaged:
        raise ValueError(
            f"resume={path}: corrupt checkpoint: changed or missing: {', '.join(damaged)}"
        )
    return names


def _was_changed(path: Path, done: DoneFile) -> bool:
    if not path.is_file():  # it is gone, or a pipe, which would never end
        return True
    size = path.stat().st_size
    return done.sizes.get(path.name, size) != size or _digest(path) != done.files[path.name]


def _complete(root: Path) -> list[Path]:
    steps = {path: NAME.fullmatch(path.name) for path in root.glob("step_*")}
    complete = {p: int(m[1]) for p, m in steps.items() if m and (p / "DONE").is_file()}
    return sorted(complete, key=lambda path: complete[path])


def _write(path: Path, state: dict[str, Any]) -> None:
    try:
        write_atomically(path, lambda temporary: torch.save(state, temporary))
    except RuntimeError as error:  # torch's word on a disk that is full, and does not say so
        free = shutil.disk_usage(path.parent).free
        raise OSError(f"{path}: cannot be written ({free:,} bytes are free): {error}") from None


def _read(path: Path) -> dict[str, Any]:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception:  # the file was not written by `save`, which shows in many ways
        raise ValueError(
            f"resume={path.parent}: corrupt checkpoint: {path.name} cannot be read as tensors"
        ) from None


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def state_of(trainer: Trainer) -> tuple[State, State]:
    """Collect a checkpoint's content: the part that all ranks share, and this rank's part.

    Raises: FloatingPointError: it has non-finite weights or gradients.
    """
    trainer.pause()
    model, sync, device = trainer.model, trainer.sync, trainer.world.device
    broadcast_buffers(model, trainer.world)
    sync_state = sync.state_dict()
    of_sync = (pair for tensors in sync_state.values() for pair in tensors.items())
    tensors = [*model.named_parameters(), *of_sync]
    if not all(local(tensor).isfinite().all() for _, tensor in tensors):  # even if no loss was not
        raise overflow(trainer.progress.step - 1, tensors)
    replica: State = {"model": gathered(model.state_dict())}
    if not sync.shards:
        names = names_of(trainer.optimizer, named(model).items())
        replica |= {"optimizer": gathered(trainer.optimizer.state_dict()), "names": names}
    shared = {
        "sync": sync_state,
        "progress": asdict(trainer.progress) | {"seconds": trainer.training_seconds()},
        "loss_scale": trainer.loss_scale and trainer.loss_scale.state_dict(),
        "channels_last": trainer.config.channels_last,
        "exchange": OmegaConf.to_container(trainer.config.exchange),
        "optim": trainer.config.optim["_target_"],
    }
    by_rank: State = {"exchange": kept_state(sync.exchange), **random_state(device)}
    (by_rank if sync.pattern.own_replicas else shared).update(replica)
    if sync.shards:
        by_rank.update(slices_of(trainer.optimizer, sync.shards))
    return shared, by_rank


def restore(trainer: Trainer, shared: State, ranks: list[State]) -> None:
    """Continue from the results of `state_of` on every rank of the same or another number.

    Args:
        shared: the part that all ranks share.
        ranks: the part of each rank that wrote the checkpoint.

    Raises: ValueError: the checkpoint is of another model or strategy.
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
            f"resume={trainer.config.resume}: the checkpoint belongs to another model; use the "
            "same model, transform and data"
        ) from None
    saved = shared["progress"]
    step, samples = saved["step"], saved["samples"]
    if any(type(count) is not int or count < 0 for count in (step, samples)):
        raise ValueError(f"resume: step={step} samples={samples}: must be integers of at least 0")
    total = total_steps(trainer.config, trainer.data.num_train, trainer.batch_size, step, samples)
    trainer.progress = Progress(**{**saved, "total_steps": total})
    trainer.first_step = trainer.progress.step
    if trainer.loss_scale and shared["loss_scale"]:
        trainer.loss_scale.load_state_dict(shared["loss_scale"])
    trainer.sync.load_state_dict(_to(shared["sync"], trainer.world.device))
    _restore_rank(trainer, ranks)


def check_fit(config: RunSettings, shared: State, ranks: list[State]) -> None:
    """Refuse a checkpoint whose tensors would mean something else in a run with these settings.

    Momentum and residuals lie in memory order; residuals belong to the exchange that left them.

    Raises: ValueError: its memory layout, its optimizer or its exchange differs.
    """
    if shared["channels_last"] != config.channels_last:
        raise ValueError(
            f"channels_last={config.channels_last}: the checkpoint was written with "
            f"channels_last={shared['channels_last']}; use the same value"
        )
    optim = config.optim["_target_"]
    if shared.get("optim", optim) != optim:  # earlier checkpoints do not say
        raise ValueError(
            f"optim={optim}: the checkpoint contains the state of {shared['optim']}; use the "
            "same optimizer"
        )
    now = by_class(OmegaConf.to_container(config.exchange))
    then = by_class(shared["exchange"])
    if ranks[0]["exchange"] and then != now:
        if then["_target_"] != now["_target_"]:
            then, now = then["_target_"], now["_target_"]
        raise ValueError(
            f"exchange={now}: the checkpoint contains residuals of exchange={then}; use the same "
            "exchange"
        )


def replica_of(rank: int | None, size: int, shared: State, ranks: list[State]) -> State:
    """Choose the weights and momentum to go on with.

    If ranks had their own and this run cannot restore each (their number changed, or all must be
    equal), that is the mean over all of them.

    Args: rank: one of `size` ranks that each have their own; None: all have the same.
    """
    if "model" in shared:
        return shared
    if rank is not None and size == len(ranks):
        return ranks[rank]
    keys = [key for key in ("model", "optimizer", "names") if key in ranks[0]]
    return mean_state([{key: state[key] for key in keys} for state in ranks])


def _restore_rank(trainer: Trainer, ranks: list[State]) -> None:
    world, exchange = trainer.world, trainer.sync.exchange
    states = [state["exchange"] for state in ranks]
    same_size = world.size == len(ranks)
    if same_size:
        set_random_state(ranks[world.rank], world.device)
    if same_size and exchange.continues(states[world.rank]):
        state = states[world.rank]
    else:
        state = exchange.redistribute(states, world.rank, world.size) if states[0] else {}
    if state:
        exchange.load_state_dict(_to(state, world.device))


def random_state(device: torch.device) -> State:
    """Return the states of a rank's generators of random numbers."""
    on_gpu = {"cuda_rng": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {}
    return {"rng": torch.get_rng_state(), **on_gpu}


def set_random_state(state: State, device: torch.device) -> None:
    torch.set_rng_state(state["rng"])
    if "cuda_rng" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda_rng"], device)


def _to(state: State, device: torch.device) -> State:
    return {key: {n: v.to(device) for n, v in tensors.items()} for key, tensors in state.items()}


def mean_state(states: list[Any]) -> Any:
    """Merge the `states` of several ranks: average tensors, keep the first's other values.

    A rank has no state of a parameter that it never used; then the mean is over the others.
    """
    states = [state for state in states if state is not None] or states
    first = states[0]
    if isinstance(first, dict):
        keys = dict.fromkeys(key for state in states for key in state)
        return {key: mean_state([state[key] for state in states if key in state]) for key in keys}
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

    Raises: ValueError: the state is of other parameters.
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
    # This optimizer's groups, with what the saved ones hold besides parameters. A rank may lack a
    # group of which it has no slice; a run sets its own hyperparameters anyway.
    own = [
        {**groups[min(number, len(groups) - 1)], "params": group["params"]}
        for number, group in enumerate(optimizer.state_dict()["param_groups"])
    ]
    _load_placed(optimizer, parameters, {"state": state, "param_groups": own})


def _load_placed(
    optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], saved: State
) -> None:
    """Load a `state_dict` of whole tensors, each sharded if its parameter is."""
    names = dict(enumerate(names_of(optimizer, parameters.items())))
    placed = {
        number: {key: like(v, parameters[names[number]]) for key, v in state.items()}
        if number in names
        else state  # of no parameter: a user's optimizer keeps it under a key of its own
        for number, state in saved["state"].items()
    }
    optimizer.load_state_dict({**saved, "state": placed})
    for number, name in names.items():
        own = optimizer.state.get(parameters[name], {})
        for key, value in placed.get(number, {}).items():
            # torch converts a state to the dtype of its parameter.
            if isinstance(value, Tensor) and own[key].dtype != value.dtype:
                own[key] = value.to(own[key].device)


def require_resumable(config: DictConfig, model: nn.Module, batch_size: int) -> None:
    """Refuse a user's optimizer that would not go on as before from what a checkpoint holds.

    It updates small copies of some parameters, is saved, loaded, and updates them once more.

    Raises: ConfigError: its state cannot be loaded, or the weights differ.
    """
    target = config.optim["_target_"]
    if target.startswith("torch.optim."):
        return
    with torch.random.fork_rng(devices=[]):
        try:
            make = Optim(config.optim, batch_size).optimizer
            copies, optimizer = small_copies(make, trainable(model).values())
            for seed in (0, 1):
                step_at_random(copies, optimizer, seed)
            again, other = small_copies(make, trainable(model).values())
            again.load_state_dict(copies.state_dict())
        except ConfigError:
            raise
        except Exception:  # of a user's optimizer that small copies do not suit
            return
        torch.save(optimizer.state_dict(), file := io.BytesIO())
        file.seek(0)
        try:
            state = torch.load(file, weights_only=True)
        except pickle.UnpicklingError as error:
            raise ConfigError(
                f"optim={target}: a checkpoint cannot be read, because the optimizer's state has "
                f"more than tensors, numbers and text: {one_line(error):.200}"
            ) from None
        load_optimizer(other, named(again).items(), {}, {"optimizer": state}, [{}])
        for each, its in ((copies, optimizer), (again, other)):
            step_at_random(each, its, seed=2)
    if not all(map(torch.equal, copies.parameters(), again.parameters())):
        raise ConfigError(
            f"optim={target}: goes on differently after a resume, because state_dict lacks some of "
            "its state; keep all of it in self.state or in param_groups"
        )


def _joined(ranks: list[State]) -> dict[str, State]:
    """Join the slices of all ranks: a parameter's whole state, tensors flat, by name."""
    pieces: dict[str, list[State]] = {}
    for rank in ranks:
        for name, piece in rank.items():
            pieces.setdefault(name, []).append(piece)
    return {
        name: {
            key: torch.cat([piece["state"][key].reshape(-1) for piece in each])
            if isinstance(value, Tensor) and value.dim()
            else value
            for key, value in each[0]["state"].items()
        }
        for name, slices in pieces.items()
        for each in [sorted(slices, key=lambda piece: piece["start"])]
    }


def _flattened(whole: State, parameters: Mapping[str, nn.Parameter]) -> dict[str, State]:
    """Return the same of a checkpoint in which one rank's optimizer had whole parameters."""
    if "names" not in whole:
        raise ValueError("an earlier version wrote no parameter names")

    def flat(value: Any, like: nn.Parameter) -> Any:
        if not isinstance(value, Tensor) or not value.dim() or value.shape != like.shape:
            return value
        laid_out = value.new_empty_strided(like.shape, like.stride()).copy_(value)
        return laid_out.as_strided((laid_out.numel(),), (1,))

    states = whole["optimizer"]["state"]
    return {
        name: {key: flat(value, parameters[name]) for key, value in states.get(n, {}).items()}
        for n, name in enumerate(whole["names"])
    }


def _cut(state: State, span: slice, model: nn.Parameter) -> State:
    """Return `span` of flat state, in the layout of `model`."""

    def cut(value: Tensor) -> Tensor:
        laid_out = value.new_empty_strided(model.shape, model.stride())
        laid_out.as_strided((laid_out.numel(),), (1,)).copy_(value[span])
        return laid_out

    return {k: cut(v) if isinstance(v, Tensor) and v.dim() else v for k, v in state.items()}
