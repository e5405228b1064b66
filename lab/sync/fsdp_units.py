"""Modules whose parameters FSDP gathers and frees together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from lab.exchange.grouping import FIRST_BUCKET_BYTES, MIB
from lab.sync.reads import after, before

NO_FORWARD = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
MODEL = "(the model's own)"  # name of the last unit


Readers = Mapping[int, set[nn.Module]]


def units(
    model: nn.Module,
    bucket_mb: float | None,
    bytes_scale: float = 1.0,
    readers: Readers | None = None,
) -> list[nn.Module]:
    """List the modules to wrap, inner before outer, and the model last.

    A unit is the largest module of at most `bucket_mb`, or a larger layer. The model itself takes
    the parameters that are left: of modules below 1 MiB, which are not worth messages of their own,
    and those that modules share. A module with a parameter that is read while the module's own
    forward is not under way is no unit: FSDP would have freed the parameter there.

    Args:
        bucket_mb: in MiB; None: the model is the only unit.
        bytes_scale: size of these parameters relative to the ones they stand for, which decide the
            units.
        readers: see `readers_of`; None: each parameter is read within its module's forward.
    """
    if bucket_mb is None:
        return [model]
    users = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    shared = {key for key, number in users.items() if number > 1}
    least, most = FIRST_BUCKET_BYTES * bytes_scale, bucket_mb * MIB * bytes_scale

    def within(module: nn.Module) -> list[nn.Module]:
        parameters = list(module.parameters())
        size = sum(p.nbytes for p in parameters)
        if size < min(least, most):
            return []
        inner = [unit for child in module.children() for unit in within(child)]
        if isinstance(module, NO_FORWARD) or any(id(p) in shared for p in parameters):
            return inner
        if readers and any(module not in readers.get(id(p), {module}) for p in parameters):
            return inner
        return [module] if size <= most or not inner else inner

    return [*(unit for child in model.children() for unit in within(child)), model]


def readers_of(model: nn.Module, inputs: Tensor) -> Readers:
    """Return, by the parameter's id, the modules that are under way at every read of it.

    One forward of `inputs` in eval mode tells. A parameter that it does not read is left out.
    """
    training = {module: module.training for module in model.modules()}
    watch = _Reads(model)
    try:
        with watch:
            model.eval()(inputs)
    finally:
        watch.forget()
        for module, mode in training.items():
            module.training = mode
    return watch.readers


class _Reads(TorchDispatchMode):
    """Watches the operations of a forward: which modules are under way when one takes a parameter.

    Gradients are enabled, as in training: without them torch's attention layers take another path.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self.readers: dict[int, set[nn.Module]] = {}
        self._under_way: list[nn.Module] = []
        self._ids: dict[int, list[int]] = {}  # of parameters, by their memory
        for parameter in model.parameters():
            if parameter.numel():
                memory = parameter.untyped_storage().data_ptr()
                self._ids.setdefault(memory, []).append(id(parameter))
        self._hooks = [hook for module in model.modules() for hook in self._marks(module)]

    def _marks(self, module: nn.Module) -> list[RemovableHandle]:
        """Mark where FSDP would gather and free: before all hooks of a module, and after them."""
        return [
            before(module, lambda: self._under_way.append(module)),
            after(module, lambda: self._under_way.remove(module)),
        ]

    def forget(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        now = set(self._under_way)
        for tensor in cast(list[object], tree_leaves((args, kwargs))):
            if isinstance(tensor, Tensor) and tensor.layout == torch.strided:
                for key in self._ids.get(tensor.untyped_storage().data_ptr(), ()):
                    self.readers[key] = self.readers.get(key, now) & now
        return func(*args, **(kwargs or {}))


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
