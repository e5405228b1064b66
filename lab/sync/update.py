"""An optimizer's step: how it runs, and what it reads, writes and keeps of each value."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache, partial
from inspect import isfunction, signature
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lab.settings.own_code import asked_for, is_users
from lab.sync.pattern import Update

WAYS = ("fused", "foreach", "differentiable")  # how torch's optimizers can be told to run
FUSED_ON_SHARDS = ("torch.optim.Adam", "torch.optim.AdamW")  # torch has no others for DTensors
SHAPE = (64, 64)  # of the matrix whose updates are counted; numbers beside it weigh nothing
NUM_STEPS = 3  # the first makes the state
# And the place of the left matrix. torch's own formulas load triton.
PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}
SHAPELESS = ("empty", "empty_like", "new_empty")  # move no values


def way_of(
    target: str, own: Collection[str], settings: Collection[str], sharded: bool
) -> str | None:
    """Return the argument with which the lab has an optimizer run fast; None: it has its own way.

    Args:
        target: its path. own: names of its arguments; settings: those that are given.
        sharded: its parameters are DTensors.
    """
    is_torchs = target.startswith("torch.optim.") and "fused" in own
    if not is_torchs or not {*WAYS}.isdisjoint(settings):
        return None
    return "foreach" if sharded and target not in FUSED_ON_SHARDS else "fused"


def update_some(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Let `optimizer` update `parameters` alone, and drop their gradients.

    For the time of its step the optimizer's groups hold nothing else, so it costs what these
    parameters cost. The results are those of one step for all only if the optimizer treats each
    parameter by itself: see lab.sync.refusals.require_piecewise.
    """
    wanted = {id(parameter) for parameter in parameters}
    groups = optimizer.param_groups
    everything = [group["params"] for group in groups]
    for group in groups:
        group["params"] = [p for p in group["params"] if id(p) in wanted]
    optimizer.param_groups = [group for group in groups if group["params"]]
    try:
        optimizer.step()
        optimizer.zero_grad()
    finally:
        optimizer.param_groups = groups
        for group, all_of_it in zip(groups, everything, strict=True):
            group["params"] = all_of_it


def update_of(optim: Mapping[str, Any]) -> Update | None:
    """Count an optimizer's step, which runs on a small matrix.

    Nothing is imported that settings alone name: the optimizer is torch's, or has been imported.

    Args:
        optim: the group `optim` of a run's settings.

    Returns:
        None for an optimizer that is unknown, or does not run so.
    """
    return _counted(json.dumps(dict(optim), sort_keys=True, default=list))


def maker_of(optim: Mapping[str, Any]) -> partial[Any] | None:
    """Return what makes an optimizer of parameters; None if it is not imported.

    Args: optim: as for `update_of`.
    """
    if (make := _known(_target_of(optim))) is None:
        return None
    return partial(make, **asked_for(make, {key: _argument(v) for key, v in optim.items()}))


def _target_of(optim: Mapping[str, Any]) -> str:
    return str(optim.get("_target_")).replace(":", ".")


@lru_cache(maxsize=1000)
def _counted(text: str) -> Update | None:
    settings = json.loads(text)
    if (maker := maker_of(settings)) is None:
        return None
    target, make, given = _target_of(settings), maker.func, maker.keywords
    own = signature(make).parameters
    # Left alone, an optimizer of torch's runs so on a GPU.
    alone = "foreach" if "foreach" in own and {*WAYS}.isdisjoint(given) else None
    ways = [way_of(target, own, given, sharded) or alone for sharded in (False, True)]
    try:
        (passes, copies, operations), (on_shards, *_) = (
            _stepped(make, {**given, **({way: True} if way else {})}) for way in ways
        )
    except Exception:  # of any code, for any reason: its step is unknown
        return None
    return Update(passes, on_shards, copies, operations)


def _argument(value: Any) -> Any:
    return tuple(cast(list[Any], value)) if isinstance(value, list) else value


def _known(target: str) -> Any:
    """Return an optimizer's class, or a user's function that makes one, if it is imported."""
    module, _, name = target.rpartition(".")
    found: object = getattr(sys.modules.get(module), name, None)
    if isinstance(found, type):
        return cast(Any, found) if issubclass(found, Optimizer) else None
    return found if isfunction(found) and is_users(found.__code__.co_filename) else None


def _stepped(make: Any, settings: Mapping[str, Any]) -> tuple[float, float, float]:
    """Return what a step reads and writes of each value, what is kept, and `Update.operations`."""
    generator = torch.Generator().manual_seed(0)
    start, *gradients = torch.randn(1 + NUM_STEPS, *SHAPE, generator=generator)
    parameter = nn.Parameter(start)
    with torch.random.fork_rng(devices=[]):  # pyright: ignore[reportUnknownMemberType]
        optimizer: Optimizer = make([parameter], **settings)
        counter = _UpdateCounter()
        for gradient in gradients:
            parameter.grad, counter.num_bytes, counter.operations = gradient, 0, 0
            with counter:
                optimizer.step()
    kept = _bytes_of(optimizer.state[parameter])
    numbers = counter.num_bytes / start.nbytes, kept / start.nbytes
    passes, copies = (round(number, 2) for number in numbers)
    return passes, copies, round(counter.operations / start.numel() / len(start), 2)


class _UpdateCounter(TorchDispatchMode):
    """Counts bytes that operations read and write, and the operations of matrix products."""

    def __init__(self) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self.num_bytes = 0
        self.operations = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing here is compiled, and to skip it torch loads its compiler: a second

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if func.is_view or name in SHAPELESS:
            return out
        arguments = func._schema.arguments
        values = [*args, *(kwargs.get(each.name) for each in arguments[len(args) :])]
        changed = [
            value
            for place, (each, value) in enumerate(zip(arguments, values, strict=True))
            # Fused kernels may change gradients too, but do not without a scaler.
            if each.is_write and not (place == 1 and name.startswith("_fused_"))
        ]
        self.num_bytes += _bytes_of(values) + _bytes_of(changed or out)
        if (place := PRODUCTS.get(name.rstrip("_"))) is not None:
            left, right = args[place : place + 2]
            self.operations += 2 * left.numel() * right.shape[-1]
        return out


def _bytes_of(tree: Any) -> int:
    return sum(each.nbytes for each in tree_leaves(tree) if isinstance(each, Tensor))
