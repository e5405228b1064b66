"""Modules whose parameters FSDP gathers and frees together."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from lab.exchange.base import Exchange
from lab.exchange.gate import sharing
from lab.exchange.grouping import FIRST_BUCKET_BYTES, MIB
from lab.exchange.layout import named
from lab.sync.base import Outside
from lab.sync.first_use import NO_FORWARD, Reads

MODEL = "(the model's own)"  # name of the last unit
SCATTERED = (torch.float32, torch.bfloat16, torch.float16)


def units(
    model: nn.Module,
    bucket_mb: float | None,
    bytes_scale: float = 1.0,
    reads: Reads | None = None,
) -> list[nn.Module]:
    """List the modules to wrap, inner before outer, and the model last.

    A unit is the largest module of at most `bucket_mb`, or a larger layer. The model itself takes
    the parameters that are left: of modules below 1 MiB, which are not worth messages of their own,
    and those that modules share. A module that FSDP would free too early, as `reads` says, is no
    unit. A unit sends one type, so modules of another type than the rest are units of any size.

    Args:
        bucket_mb: in MiB; None: the model is the only unit.
        bytes_scale: size of these parameters relative to the ones they stand for, which decide the
            units.
        reads: of a forward; None: each parameter is read within its module's forward.

    Raises:
        ValueError: a parameter has another type than the others of its layer.
    """
    users = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    shared = {key for key, number in users.items() if number > 1}

    def may_be(module: nn.Module) -> bool:
        if isinstance(module, NO_FORWARD) or any(id(p) in shared for p in module.parameters()):
            return False
        one_type = len({p.dtype for p in module.parameters() if p.requires_grad}) < 2
        return one_type and (reads is None or reads.are_enclosed_by(module))

    found = list[nn.Module]()
    if bucket_mb is not None:
        least, most = FIRST_BUCKET_BYTES * bytes_scale, bucket_mb * MIB * bytes_scale
        for child in model.children():
            found += _by_size(child, min(least, most), most, may_be)
        found = [*dict.fromkeys(found)]  # a module may have several parents
    return [*found, *_of_other_types(model, found, may_be), model]


def _by_size(
    module: nn.Module, least: float, most: float, may_be: Callable[[nn.Module], bool]
) -> list[nn.Module]:
    size = sum(p.nbytes for p in module.parameters())
    if size < least:
        return []
    inner = [u for child in module.children() for u in _by_size(child, least, most, may_be)]
    if not may_be(module):
        return inner
    return [module] if size <= most or not inner else inner


def _of_other_types(
    model: nn.Module, found: Sequence[nn.Module], may_be: Callable[[nn.Module], bool]
) -> list[nn.Module]:
    """List more units, so that what is left for the model has one type: the largest that works."""
    taken = {id(p) for unit in found for p in unit.parameters()}
    left = [(n, p) for n, p in model.named_parameters() if p.requires_grad and id(p) not in taken]
    sizes = Counter[torch.dtype]()
    for _, parameter in left:
        sizes[parameter.dtype] += parameter.nbytes
    strangers = list[tuple[str, nn.Parameter]]()
    for own, _ in sizes.most_common():
        more = _without(own, model, {*taken}, may_be)
        within = {id(p) for unit in more for p in unit.parameters()}
        strangers = [(n, p) for n, p in left if p.dtype != own and id(p) not in within]
        if not strangers:
            return more
    if not strangers:  # nothing is left
        return []
    name, parameter = strangers[0]
    kinds = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in sizes))
    raise ValueError(
        f"{name} is {str(parameter.dtype).removeprefix('torch.')} in a module that cannot be "
        f"sent separately; FSDP sends one type for each module, but this one contains {kinds}; "
        "convert the parameter"
    )


def _without(
    own: torch.dtype, model: nn.Module, taken: set[int], may_be: Callable[[nn.Module], bool]
) -> list[nn.Module]:
    """List the largest modules that may be units and have no trainable parameter of type `own`."""
    more = list[nn.Module]()
    for module in model.modules():
        left = {id(p): p.dtype for p in module.parameters() if p.requires_grad}
        left = {key: dtype for key, dtype in left.items() if key not in taken}
        if left and own not in left.values() and module is not model and may_be(module):
            more.append(module)
            taken |= left.keys()
    return more


def groups_of(unit: FSDPModule) -> list[Any]:
    """List FSDP's own objects for the parameters that a unit gathers (FSDPParamGroup).

    A unit has at most one until torch 2.11, and a list of them in later versions.
    """
    state = state_of(unit)
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    return [state._fsdp_param_group] if state._fsdp_param_group else []


def state_of(unit: FSDPModule) -> Any:
    """Return FSDP's own object for a unit (FSDPState)."""
    return unit._get_fsdp_state()  # pyright: ignore[reportPrivateUsage]


def sharded_parameters(unit: FSDPModule) -> list[nn.Parameter]:
    """List the parameters that a unit gathers, in the order of its gradients."""
    return [each.sharded_param for group in groups_of(unit) for each in group.fsdp_params]


def modules_of_fsdp(model: nn.Module) -> list[tuple[str, FSDPModule]]:
    """List the modules that FSDP2 shards, with names for messages."""
    modules = cast(Iterable[tuple[str, nn.Module]], model.named_modules())
    return [(name or MODEL, each) for name, each in modules if isinstance(each, FSDPModule)]


def prepare_for_sharding(model: nn.Module) -> None:
    """Refuse parameters that FSDP2 cannot shard; make others contiguous, as it needs them.

    Raises:
        ValueError: naming a parameter that has no dimension, has hooks, which FSDP would drop, or
            shares memory with another, which FSDP would part.
    """
    for name, parameter in model.named_parameters():
        if not parameter.dim():
            raise ValueError(
                f"{name} is a single number of shape []; FSDP divides the first dimension, so "
                "give it shape [1]"
            )
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                f"{name} has a hook, which FSDP would not call; remove it, or use a "
                "strategy without shards, such as overlap"
            )
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    if shared := sharing({n: t for n, t in tensors.items() if t.layout == torch.strided}):
        name, other = shared
        raise ValueError(
            f"{name} shares memory with {other}, which FSDP would separate; make them one "
            "parameter, as in head.weight = embedding.weight"
        )
    for parameter in model.parameters():
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()


@contextmanager
def replacing(model: nn.Module) -> Generator[None]:
    """Enclose the wrapping of a model, in which FSDP2 puts sharded parameters for whole ones.

    Raises:
        ValueError: something still holds a whole parameter, naming it: it would be read as it was
            before training, and no gradient of it would count.
    """
    before = {name: weakref.ref(parameter) for name, parameter in model.named_parameters()}
    yield
    gc.collect()  # what only a cycle holds is not held
    for name, parameter in before.items():
        if (whole := parameter()) is not None and gc.get_referrers(whole):  # none: a graph has it
            raise ValueError(
                f"{name} is stored in a list, closure or other object outside its module, where "
                "FSDP cannot replace it; read it as an attribute of its module"
            )


class FreedReads(TorchFunctionMode):
    """Names the parameter, where an operation takes one whose values FSDP has freed.

    Raises:
        ValueError: in place of torch's "mixed torch.Tensor and DTensor".
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except RuntimeError as error:
            taken = {id(leaf) for leaf in cast(list[object], tree_leaves((args, kwargs)))}
            names = [name for name, p in self._model.named_parameters() if id(p) in taken]
            if "mixed torch.Tensor and DTensor" not in str(error) or not names:
                raise
            raise ValueError(
                f"{names[0]} is read outside its module's forward pass, when FSDP has freed "
                "it; set bucket_mb=null, which makes the model one unit"
            ) from error


def require_scattered(model: nn.Module, exchange: Exchange) -> None:
    """Refuse parameters of types that the lab's reduce-scatters do not carry."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype not in SCATTERED:
            kind = str(parameter.dtype).removeprefix("torch.")
            raise ValueError(
                f"{name} is {kind}; exchange={type(exchange).__name__} scatters only float32, "
                "bfloat16 and float16 gradients; use torch's reduce-scatter for this model"
            )


class WholeGradients:
    """Lets FSDP modules scatter gradients of all their trainable parameters, on all ranks alike.

    FSDP2 scatters those that there are: where ranks reach different ones, it adds one parameter's
    gradient to another's. So a rank gives zeros for what it has not reached. What no rank reached
    has no gradient after backward, by one all-reduce of a byte for each parameter. Gradients that
    come when a module's have been sent (reentrant recomputation) are sent after the others; FSDP2
    would forget them. Sparse ones are made dense.

    Backward raises a RuntimeError where another rank ran a module that this one did not, and where
    a module was wrapped, or a layer added or replaced, later.

    Args:
        model: after the last fully_shard. Of one that has this already, nothing changes.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = [module for _, module in modules_of_fsdp(model)]
        self._model, self._known = model, {*map(id, modules)}
        self._groups = [group for module in modules for group in groups_of(module)]
        self._ran: set[int] = set()  # ids of groups that have sent in this backward
        self._empty: set[int] = set()  # ids of parameters that had no gradient before it
        self._reached: set[int] = set()  # ids of those that this rank has reached
        self._all = torch.empty(0)  # flags of a rank that has reached all
        self._names = {id(parameter): name for name, parameter in named(model).items()}
        if any("post_backward" in vars(group) for group in self._groups):
            return
        self._outside = Outside(model, named(model))  # frozen ones are sharded, and may thaw
        for group in self._groups:
            group.post_backward = partial(self._send, group, group.post_backward)
        for module in modules:
            state = state_of(module)
            end = partial(self._end_backward, state._root_post_backward_final_callback)
            state._root_post_backward_final_callback = end

    def _send(self, group: Any, send: Callable[..., None], *_: object) -> None:
        if not self._ran:
            self._refuse_later()
        if group.reduce_grads and group._training_state.name in ("FORWARD", "PRE_BACKWARD"):
            self._ran.add(id(group))
            for parameter in group.fsdp_params:
                if parameter.sharded_param.requires_grad:
                    self._complete(parameter)
        send()

    def _refuse_later(self) -> None:
        """Refuse modules that were wrapped since: torch alone would scatter their gradients."""
        for name, module in modules_of_fsdp(self._model):
            if id(module) not in self._known:
                raise RuntimeError(
                    f"{name}: was wrapped after lab.fsdp_reduce_scatter; call that after the last "
                    "fully_shard"
                )

    def _complete(self, parameter: Any) -> None:
        whole: Tensor = parameter.unsharded_param
        if not whole.numel():
            whole.grad = None  # FSDP2 cannot scatter it, and nothing is in it
            return
        if parameter.sharded_param.grad is None:
            self._empty.add(id(parameter))
        if parameter.unsharded_accumulated_grad is not None:
            self._reached.add(id(parameter))
        elif whole.grad is None:
            whole.grad = torch.zeros_like(whole)
        else:
            self._reached.add(id(parameter))
            if whole.grad.layout != torch.strided:
                whole.grad = whole.grad.to_dense()

    def _end_backward(self, end: Callable[[], None]) -> None:
        for group in self._groups:
            if group.reduce_grads and any(map(_is_left, group.fsdp_params)):
                state = cast(Any, type(group._training_state))
                group._training_state = state.PRE_BACKWARD
        end()
        if self._ran:
            self._forget_zeros()
        self._ran, self._empty, self._reached = set(), set(), set()
        self._outside.refuse_trained()

    def _forget_zeros(self) -> None:
        parameters = [
            (parameter, id(group) in self._ran)
            for group in self._groups
            for parameter in group.fsdp_params
            if parameter.sharded_param.requires_grad and parameter.sharded_param.numel()
        ]
        own = [id(parameter) in self._reached for parameter, _ in parameters]
        anywhere = self._flags(own)
        info = self._groups[0].mesh_info  # over which all ranks meet: HSDP's between copies, too
        for kind in ("shard_process_group", "replicate_process_group"):
            if group := getattr(info, kind, None):
                dist.all_reduce(anywhere, dist.ReduceOp.MAX, group)  # pyright: ignore[reportUnknownMemberType]
        if all(own):
            return
        reached = cast(list[int], anywhere.tolist())  # pyright: ignore[reportUnknownMemberType]
        for (parameter, ran), needed in zip(parameters, reached, strict=True):
            if needed and not ran:
                raise RuntimeError(
                    f"{self._names[id(parameter.sharded_param)]}: another rank ran this "
                    "parameter's module but this rank did not, and FSDP needs all ranks to run the "
                    "same modules; set bucket_mb=null, which makes the model one unit"
                )
            if not needed and id(parameter) in self._empty:
                parameter.sharded_param.grad = None

    def _flags(self, own: list[bool]) -> torch.Tensor:
        """Return flags on the device, uint8 [parameters]; a host that has all waits for nothing."""
        if len(self._all) != len(own):
            self._all = torch.ones(len(own), dtype=torch.uint8, device=self._groups[0].device)
        flags = self._all.clone()
        if not all(own):
            flags[[place for place, reached in enumerate(own) if not reached]] = 0
        return flags


def _is_left(parameter: Any) -> bool:  # a gradient came after its module's had been sent
    return hasattr(parameter, "_unsharded_param") and parameter.unsharded_param.grad is not None
