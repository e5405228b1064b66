"""Settings and ranks of an exchange in the user's own program."""

from __future__ import annotations

import functools
import inspect
import json
import os
import re
import socket
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import nn
from torch.distributed import distributed_c10d

from lab.cluster.settings import adopt_ranks
from lab.distributed.launcher import RankInfo, was_launched
from lab.distributed.torch_comm import TorchComm, group_of, nccl_options
from lab.distributed.world import World
from lab.settings.config import FIELDS, ConfigError, check_batch, load
from lab.settings.errors import one_line
from lab.settings.files import choices_of
from lab.settings.names import OF_STRATEGY, class_name
from lab.settings.overrides import quoted
from lab.sync.pattern import class_of

P = ParamSpec("P")
R = TypeVar("R")
COMMON = ("exchange", "path", "codec", "memory", "exchange_timeout_s", "config_dir")


def refuses_misuse(function: Callable[P, R]) -> Callable[P, R]:
    """Let `function` refuse arguments that it does not have, or that are missing, in one line."""
    signature = inspect.signature(function)
    name = function.__qualname__.removesuffix(".__init__")
    names = ", ".join(key for key in signature.parameters if key != "self")

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise ConfigError(f"lab.{name}: {error}; arguments: {names}") from None
        return function(*args, **kwargs)

    return checked


def require_module(key: str, value: object) -> None:
    """Refuse what is no module, such as a list of parameters, and a call in inference mode."""
    if not isinstance(value, nn.Module):
        raise ConfigError(
            f"{key}: has type {type(value).__name__}; must be an nn.Module; to pass several, "
            "combine them in nn.ModuleList(…)"
        )
    if torch.is_inference_mode_enabled():  # training may change no tensor that is made in it
        raise ConfigError(f"{key}: passed in torch.inference_mode(); pass it outside of it")


def compose(strategy: str, overrides: Mapping[str, Any], own: tuple[str, ...] = ()) -> DictConfig:
    """Compose a strategy that averages gradients in every step, and nothing else.

    Args:
        strategy: a choice of strategy= or exchange=.
        overrides: more settings by dotted key, such as {"exchange.threshold": "mean"}.
        own: keys that are allowed besides COMMON.

    Raises:
        ConfigError: an unknown name or key, or a strategy that does more, less or something else.
    """
    if not isinstance(strategy, str):
        raise ConfigError(f"strategy={strategy!r}: must be the name of a strategy or an exchange")
    for key, value in overrides.items():
        if key.split(".")[0] not in (allowed := (*COMMON, *own)):
            raise ConfigError(
                f"{key}={value}: not allowed in your own loop; allowed: {', '.join(allowed)}"
            )
    folder = overrides.get("config_dir")
    words = [_word(key, value) for key, value in overrides.items()]
    exchanges = [name for name in choices_of("exchange", folder) if name != "none"]
    reason = "there is no such strategy or exchange"
    chosen: list[str] = []
    if strategy in choices_of("strategy", folder):
        chosen = [f"strategy={strategy}"]
    elif strategy in exchanges or not strategy.isidentifier():  # a path to one's own
        chosen = ["strategy=overlap", f"exchange={strategy}"]
    if chosen and not (reason := _refusal(config := load([*chosen, *words]))):
        return config
    names = ", ".join(("overlap", *exchanges))
    raise ConfigError(f"strategy={strategy}: {reason}; in your own loop, use any of {names}")


def _refusal(config: DictConfig) -> str:
    """Return why a strategy is no average of gradients in every step; empty if it is."""
    if (sync := class_of(config)) != "GradSync":
        return f"has a sync of its own ({sync}), which only lab.train runs"
    if "_target_" in config.transform:
        return "also rewrites the model"
    return "exchanges nothing" if class_name(config.exchange._target_) == "NoExchange" else ""


def _word(key: str, value: Any) -> str:
    """Write a setting in the grammar of the command line. ConfigError: it has no such value."""
    if isinstance(value, Mapping):
        name = next(iter(cast(Mapping[str, Any], value)), "KEY")
        raise ConfigError(f"{key}={value}: must be no dict; set each key, as in {key}.{name}")
    if isinstance(value, os.PathLike):
        value = os.fspath(cast("os.PathLike[str]", value))
    if isinstance(value, str):
        return f"{key}=" + (value if re.fullmatch(r"[\w./:+-]+", value) else quoted(value))
    try:
        return f"{key}={json.dumps(value)}"
    except TypeError:
        given = f"{key}={value}: has type {type(value).__name__}"
        raise ConfigError(f"{given}; must be a number, text, or a list of them") from None


def settings_of_run(
    strategy: str | None,
    composed: Mapping[str, Any] | None,
    model: str,
    own: Mapping[str, Any],
    world_size: int,
    **scalars: Any,
) -> DictConfig:
    """Return the settings of a run, checked, as `config.yaml` holds them.

    Args:
        strategy: names how gradients are exchanged; None: as `composed` does.
        composed: the settings behind a result of `lab.attach` or `lab.grad_sync`.
        own: settings of the user's own.
        scalars: settings that lab.train has too.

    Raises:
        ConfigError: neither strategy nor `composed`, a value that lab.train would refuse, or an own
            setting with a name of the lab's or a value that no file of settings can hold.
    """
    if composed is None and strategy is None:
        raise ConfigError("strategy=None: name a strategy or an exchange, or pass sync=")
    try:
        OmegaConf.create(dict(own))
    except (OmegaConfBaseException, RecursionError, TypeError, ValueError) as error:
        raise ConfigError(
            "settings: must map names to numbers, strings, or lists and dicts of them: "
            f"{one_line(error)}"
        ) from None
    if taken := {*FIELDS} & set(own):
        raise ConfigError(f"settings: {min(taken)} is a name that the lab uses; choose another")
    known = strategy in choices_of("strategy")
    words = [f"strategy={strategy}"] if known else []
    checked = load([*words, *(_word(key, value) for key, value in scalars.items())])
    check_batch(checked, world_size)
    settings: Any = OmegaConf.to_container(checked, resolve=True)
    source = composed or (settings if known else {})
    return OmegaConf.create(
        {
            "strategy": strategy or source["strategy"],
            "model": {"name": model},
            **{key: settings[key] for key in scalars},
            **{key: source[key] for key in OF_STRATEGY if key in source},
            **own,
        }
    )


def world_of(
    group: dist.ProcessGroup | None, device: torch.device, timeout_s: float = 300.0
) -> World:
    """Make process groups of the same ranks as `group`, for the lab alone. A collective call.

    The program's own collectives and the lab's then need no common order.

    Args:
        group: a process group that this rank is in; None: all ranks that a launcher started, whose
            default group is made if the program has not. Ranks outside need not call this.
        device: where tensors to exchange lie.
        timeout_s: longest time of a collective.

    Raises: ConfigError: `group` is no process group, or this rank is outside it.
    """
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise ConfigError(
            f"group={group!r}: must be a process group that this rank is in, such "
            "as torch.distributed.new_group([0, 1]), or None"
        )
    if group is None:
        if not dist.is_initialized():
            adopt_ranks()
            alone: dict[str, Any] = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
            dist.init_process_group(**({} if was_launched() else alone))
        group = dist.group.WORLD
    assert group is not None  # it is initialised
    ranks = dist.get_process_group_ranks(group)
    limit = timedelta(seconds=timeout_s)
    backends = dist.get_backend_config(group)  # such as cpu:gloo,cuda:nccl
    backend = dict(entry.split(":") for entry in backends.split(","))[device.type]
    control = group_of(ranks, "gloo", limit)
    if backend == "nccl":
        main = second = group_of(ranks, "nccl", limit, nccl_options(limit))
    else:
        # Connections of their own for second stages: on each, all ranks agree on the order.
        main, second = group_of(ranks, backend, limit), group_of(ranks, backend, limit)
    comm = TorchComm(main, second, device, limit)
    place, comm.nodes = _place(control)
    return World(place, device, dist.PrefixStore("lab", place.store), comm, control)


def _place(control: dist.ProcessGroup) -> tuple[RankInfo, list[list[int]]]:
    """Return this rank's place among those of `control`, and the ranks of each node."""
    hosts: list[Any] = [None] * control.size()
    # torchrun's number of a node tells apart those that are emulated on one host.
    node = socket.gethostname(), os.environ.get("GROUP_RANK")
    dist.all_gather_object(hosts, node, control)
    rank = control.rank()
    nodes = [[at for at, host in enumerate(hosts) if host == one] for one in dict.fromkeys(hosts)]
    beside = next(node for node in nodes if rank in node)
    launcher = "torchrun" if dist.is_torchelastic_launched() else "env"
    launcher = launcher if was_launched() else "python"
    store = cast(Any, distributed_c10d)._get_default_store()
    local_rank, local_size = beside.index(rank), len(beside)
    return RankInfo(launcher, rank, control.size(), local_rank, local_size, store), nodes
