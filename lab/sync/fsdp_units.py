"""Modules whose parameters FSDP gathers and frees together."""

from __future__ import annotations

import gc
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from lab.exchange.base import Exchange
from lab.exchange.grouping import FIRST_BUCKET_BYTES, MIB
from lab.sync.reads import after, before

NO_FORWARD = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
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
        f"{name}: is {str(parameter.dtype).removeprefix('torch.')} in a module that cannot be sent "
        f"apart from others; FSDP sends one type for each module, and here are {kinds}: convert it"
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


class Reads(TorchDispatchMode):
    """Watches one forward: which modules are under way when an operation takes a parameter.

    Gradients are enabled, as in training: without them torch's attention layers take another path.

    Args:
        inputs: that the model takes. It sees them in eval mode.
    """

    def __init__(self, model: nn.Module, inputs: Tensor) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self._ran = set[nn.Module]()
        self._under_way: list[nn.Module] = []
        self._readers: dict[int, set[nn.Module]] = {}  # under way at all reads, by parameter's id
        self._ids: dict[int, list[int]] = {}  # of parameters, by their memory
        for parameter in model.parameters():
            self._ids.setdefault(_memory_of(parameter), []).append(id(parameter))
        training = {module: module.training for module in model.modules()}
        hooks = [hook for module in training for hook in self._marks(module)]
        try:
            with self:
                model.eval()(inputs)
        finally:
            for hook in hooks:
                hook.remove()
            for module, mode in training.items():
                module.training = mode
        self._routed = {
            inner for module in training if self._routes(module) for inner in module.modules()
        }

    def are_enclosed_by(self, module: nn.Module) -> bool:
        """Return whether `module` runs on every rank, around all reads of its parameters.

        Of a list of which the forward ran some modules, a rank may run others.
        """
        if module not in self._ran or module in self._routed:
            return False
        return all(module in self._readers.get(id(p), {module}) for p in module.parameters())

    def _routes(self, module: nn.Module) -> bool:
        children = [
            child for child in module.children() if next(child.parameters(), None) is not None
        ]
        return isinstance(module, NO_FORWARD) and not self._ran.issuperset(children)

    def _marks(self, module: nn.Module) -> list[RemovableHandle]:
        """Mark where FSDP would gather and free: before all hooks of a module, and after them."""
        return [
            before(module, lambda: self._begin(module)),
            after(module, lambda: self._under_way.remove(module)),
        ]

    def _begin(self, module: nn.Module) -> None:
        self._ran.add(module)
        self._under_way.append(module)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        now = set(self._under_way)
        for tensor in cast(list[object], tree_leaves((args, kwargs))):
            if isinstance(tensor, Tensor) and tensor.layout == torch.strided:
                for key in self._ids.get(_memory_of(tensor), ()):
                    self._readers[key] = self._readers.get(key, now) & now
        return func(*args, **(kwargs or {}))


def _memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() or id(tensor)  # an empty one has none


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
                f"{name}: is a single number, shape []; FSDP divides the first dimension, so give "
                "it shape [1]"
            )
        if _hooks_of(parameter):
            raise ValueError(
                f"{name}: has a hook of its own, which FSDP would not call; remove it, or use a "
                "strategy without shards, such as overlap"
            )
    _require_own_memory(model)
    for parameter in model.parameters():
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()


def _hooks_of(parameter: nn.Parameter) -> int:
    kinds = parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None)
    return sum(len(hooks) for hooks in kinds if hooks)


def _require_own_memory(model: nn.Module) -> None:
    """Refuse a parameter whose values another parameter, or a buffer, holds too."""
    sharing: dict[int, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.layout == torch.strided and tensor.numel():
            sharing[tensor.untyped_storage().data_ptr()][name] = tensor
    for tensors in sharing.values():
        if len(tensors) > 1:
            _require_apart(tensors)


def _require_apart(tensors: Mapping[str, Tensor]) -> None:
    """Refuse a tensor that has bytes of a parameter among those before it, all of one storage."""
    storage = next(iter(tensors.values())).untyped_storage()
    taken = torch.zeros(storage.nbytes(), dtype=torch.bool)
    for name, tensor in tensors.items():
        size = tensor.element_size()
        steps = *(step * size for step in tensor.stride()), 1
        own = taken.as_strided((*tensor.shape, size), steps, tensor.storage_offset() * size)
        if own.any():
            others = ", ".join(other for other in tensors if other != name)
            raise ValueError(
                f"{name}: shares memory with {others}, which FSDP would part; make them one "
                "parameter, as in head.weight = embedding.weight"
            )
        if isinstance(tensor, nn.Parameter):
            own.fill_(True)


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
                f"{name}: is held in a list, closure or other object beside its module, where FSDP "
                "cannot replace it; read it as an attribute of its module"
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
                f"{names[0]}: is read while the forward of its module is not under way, where FSDP "
                "has freed it; set bucket_mb=null, which makes the model one unit"
            ) from error


def require_scattered(model: nn.Module, exchange: Exchange) -> None:
    """Refuse gradients that the lab's reduce-scatters do not carry.

    Raises:
        ValueError: naming a trainable parameter in another type than float32, bfloat16, float16.
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype not in SCATTERED:
            kind = str(parameter.dtype).removeprefix("torch.")
            raise ValueError(
                f"{name}: is {kind}; exchange={type(exchange).__name__} scatters float32, bfloat16 "
                "and float16 gradients. Leave this model to torch's reduce-scatter"
            )
