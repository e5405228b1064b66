"""Modules whose parameters FSDP gathers and frees together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, cast

from torch import nn
from torch.distributed.fsdp import FSDPModule

from lab.exchange.grouping import FIRST_BUCKET_BYTES, MIB

NO_FORWARD = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
MODEL = "(the model's own)"  # name of the last unit


def units(model: nn.Module, bucket_mb: float | None, bytes_scale: float = 1.0) -> list[nn.Module]:
    """List the modules to wrap, inner before outer, and the model last.

    A unit is the largest module of at most `bucket_mb`, or a larger layer. The model itself takes
    the parameters that are left: of modules below 1 MiB, which are not worth messages of their own,
    and those that modules share.

    Args:
        bucket_mb: in MiB; None: the model is the only unit.
        bytes_scale: size of these parameters relative to the ones they stand for, which decide the
            units.
    """
    if bucket_mb is None:
        return [model]
    users = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    shared = {key for key, number in users.items() if number > 1}
    most = bucket_mb * MIB * bytes_scale
    found = [u for child in model.children() for u in _within(child, most, bytes_scale, shared)]
    return [*found, model]


def _within(
    module: nn.Module, most: float, bytes_scale: float, shared: set[int]
) -> list[nn.Module]:
    parameters = list(module.parameters())
    size = sum(p.nbytes for p in parameters)
    if size < min(FIRST_BUCKET_BYTES * bytes_scale, most):
        return []
    inner = [u for child in module.children() for u in _within(child, most, bytes_scale, shared)]
    if isinstance(module, NO_FORWARD) or any(id(p) in shared for p in parameters):
        return inner
    return [module] if size <= most or not inner else inner


def groups_of(unit: FSDPModule) -> list[Any]:
    """List FSDP's own objects for the parameters that a unit gathers (FSDPParamGroup).

    A unit has at most one until torch 2.11, and a list of them in later versions.
    """
    state: Any = unit._get_fsdp_state()  # pyright: ignore[reportPrivateUsage]
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    return [state._fsdp_param_group] if state._fsdp_param_group else []


def sharded_parameters(unit: FSDPModule) -> list[nn.Parameter]:
    """List the parameters that a unit gathers, in the order of its gradients."""
    return [each.sharded_param for group in groups_of(unit) for each in group.fsdp_params]


def modules_of_fsdp(model: nn.Module) -> list[tuple[str, FSDPModule]]:
    """List the modules that FSDP2 shards, with names for messages."""
    modules = cast(Iterable[tuple[str, nn.Module]], model.named_modules())
    return [(name or MODEL, each) for name, each in modules if isinstance(each, FSDPModule)]
