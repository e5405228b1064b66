"""The gate: which parameters an exchange takes, decided once, before the first step."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, cast
from weakref import WeakMethod

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from lab.exchange.base import ADDED, Exchange
from lab.exchange.layout import is_dense, named, trainable


def admit(model: nn.Module, exchange: Exchange) -> dict[str, nn.Parameter]:
    """Return the trainable parameters of `model` by name, ready for `exchange`.

    Every entrance calls this, so they all take the same models. A parameter that is a slice of a
    larger tensor (columns, every other row) gets memory of its own, with the same values: kernels
    that read or write consecutive values, such as those of torch's fused optimizers on CPUs, would
    otherwise reach into its neighbours.

    Raises:
        ValueError: a parameter that cannot be exchanged rightly; names it and says what to do. Or
            the exchange is none.
    """
    if not isinstance(cast(object, exchange), Exchange):
        kind = type(exchange).__qualname__
        raise ValueError(f"exchange={kind}: must be a subclass of lab.exchange.base.Exchange")
    require_values(model)
    parameters = trainable(model)
    if not any(is_lazy(p) or p.numel() for p in parameters.values()):
        raise ValueError("model has no trainable parameters, so there is nothing to exchange")
    for name, parameter in parameters.items():
        if problem := _problem(parameter, exchange):
            raise ValueError(f"{name}: {problem}")
    devices = {p.device: name for name, p in reversed(parameters.items())}
    if len(devices) > 1:
        (device, name), (other, first), *_ = devices.items()
        raise ValueError(
            f"{name} is on {device}, but {first} is on {other}; move the whole model to one "
            "device with model.to(device)"
        )
    if shared := sharing(parameters):
        name, other = shared
        raise ValueError(
            f"{name} shares memory with {other}; make them one parameter (assign the same "
            "nn.Parameter to both modules), or copy one with clone()"
        )
    for parameter in parameters.values():
        if not is_dense(parameter) or parameter.is_conj():
            values = parameter.detach().resolve_conj()
            parameter.data = values.clone(memory_format=torch.contiguous_format)
    return parameters


def require_values(model: nn.Module) -> None:
    """Refuse a model that has a tensor on torch's meta device; it can be moved nowhere.

    Raises:
        ValueError: names the tensor, and the cure.
    """
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if tensor.is_meta:
            raise ValueError(
                f"{name} has no values (device meta); build the model on its device, or use "
                "to_empty"
            )


def is_linear(model: nn.Module) -> bool:
    """Return whether gradients of a loss divided by N are surely the loss's gradients over N.

    Code of the user's own may clip gradients or add to them, in a hook or in a backward. So the
    model must be made of torch's and the lab's modules alone, without hooks that see gradients.
    """
    for module in model.modules():
        if type(module).__module__.partition(".")[0] not in ("torch", "lab"):
            return False
        if module._backward_hooks or module._backward_pre_hooks:
            return False
    hooks = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return not any(getattr(p, name, None) for p in model.parameters() for name in hooks)


def carrier(dtype: torch.dtype, exchange: Exchange) -> torch.dtype | None:
    """Return the real dtype in which `exchange` takes gradients of `dtype`; None: it does not."""
    real = dtype.to_real()
    if dtype.is_complex and exchange.delivers == "direction":
        return None
    if real in exchange.dtypes:
        return real
    return torch.float32 if real in (torch.bfloat16, torch.float16) else None


def _problem(parameter: nn.Parameter, exchange: Exchange) -> str:
    """Return why a parameter cannot be exchanged, and the cure; empty if it can."""
    kind = str(parameter.dtype).removeprefix("torch.")
    if is_lazy(parameter):
        return "has no values yet (a lazy module); run one batch through the model first"
    if parameter.is_inference():
        return (
            "was made in torch.inference_mode(), so it cannot be trained; build the model outside"
        )
    if "DTensor" in {each.__name__ for each in type(parameter).__mro__}:
        return "is a DTensor, sharded by another library; pass the plain module instead"
    if parameter.layout != torch.strided:
        layout = str(parameter.layout).removeprefix("torch.")
        return f"has the layout {layout}; only dense parameters are exchanged; use to_dense()"
    if (kept := getattr(parameter, "grad_dtype", parameter.dtype)) != parameter.dtype:
        return f"has grad_dtype={kept}; only gradients in its own dtype are exchanged"
    if _overlaps_itself(parameter):
        return "several of its values share memory (expanded); copy it with clone()"
    if carrier(parameter.dtype, exchange) is None:
        taken = "float32, bfloat16 and float16" + (
            ", and complex64 as pairs" if exchange.delivers == "mean" else ""
        )
        name = type(exchange).__name__
        if exchange.dtypes >= ADDED:
            return f"is {kind}, which exchange={name} cannot add; allowed: float64, {taken}"
        return (
            f"is {kind}; exchange={name} accepts {taken}; convert it, or use an exchange that "
            "adds without rounding, such as exchange=allreduce"
        )
    return ""


def _overlaps_itself(tensor: Tensor) -> bool:
    """Return whether two values of a tensor may lie in one place, as in an expanded one."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def sharing(tensors: Mapping[str, Tensor]) -> tuple[str, str] | None:
    """Return the names of a tensor and of a parameter that have bytes in common; None: no two."""
    by_storage: dict[int, list[tuple[int, int, str]]] = defaultdict(list)
    for name, p in tensors.items():
        if p.numel():
            size, start = p.element_size(), p.element_size() * int(p.storage_offset())
            reach = sum(
                (n - 1) * int(stride) for n, stride in zip(p.shape, p.stride(), strict=True)
            )
            key = p.untyped_storage().data_ptr()
            by_storage[key].append((start, start + (reach + 1) * size, name))
    for extents in by_storage.values():
        extents.sort()
        apart = all(a[1] <= b[0] for a, b in itertools.pairwise(extents))
        if not apart:  # columns of one matrix, or the same values
            names = [name for *_, name in extents]
            names.sort(key=lambda name: not isinstance(tensors[name], nn.Parameter))
            if found := _with_common_bytes({name: tensors[name] for name in names}):
                return found
    return None


def _with_common_bytes(tensors: Mapping[str, Tensor]) -> tuple[str, str] | None:
    """Return a tensor of one storage, and a parameter before it, that share a byte."""
    names = list(tensors)
    storage = tensors[names[0]].untyped_storage()
    owner = torch.full((storage.nbytes(),), -1, dtype=torch.int32)
    for number, (name, p) in enumerate(tensors.items()):
        size = p.element_size()
        strides = (*(size * stride for stride in p.stride()), 1)
        own = owner.as_strided((*p.shape, size), strides, size * p.storage_offset())
        if (other := int(own.max())) >= 0:
            return name, names[other]
        if isinstance(p, nn.Parameter):
            own.fill_(number)
    return None


class Listeners:
    """Methods that torch calls for all modules or optimizers, each as long as its object lives.

    Torch has one hook for all of them, and for good. It fails if a hook is removed while it goes
    through its hooks, which a garbage collection may do at any moment.

    Args:
        registers: of torch: each adds a global hook.
    """

    def __init__(self, *registers: Callable[[Callable[..., Any]], object]) -> None:
        self._registers = registers
        self._methods: list[WeakMethod[Callable[..., Any]]] = []

    def add(self, method: Callable[..., Any]) -> None:
        """Call a bound method with what torch gives its hooks; it may return other arguments."""
        for register in self._registers:
            register(self._call)
        self._registers = ()
        alive = [known for known in self._methods if known() is not None]
        self._methods = [*alive, WeakMethod(method)]

    def remove(self, method: Callable[..., Any]) -> None:
        """Call it no more."""
        self._methods = [known for known in self._methods if known() != method]

    def _call(self, of: nn.Module | Optimizer, *given: Any) -> tuple[Any, ...] | None:
        changed = None
        for known in self._methods:
            if (method := known()) is not None:
                changed = method(of, *(changed or given)) or changed
        return changed


REGISTRATIONS = Listeners(
    register_module_parameter_registration_hook, register_module_module_registration_hook
)
BEFORE_UPDATES = Listeners(register_optimizer_step_pre_hook)
AFTER_UPDATES = Listeners(register_optimizer_step_post_hook)


class Outside:
    """The parameters of a model that no exchange was set up for: frozen ones, and any to come.

    Args:
        admitted: the others, a result of `admit`.
    """

    def __init__(self, model: nn.Module, admitted: Mapping[str, nn.Parameter]) -> None:
        self._model, self._admitted = model, admitted
        self._parameters = self._found()
        self._has_trained = False
        # Perhaps: torch tells of the registrations of all modules.
        self._has_changed = self._is_parametrized = False
        REGISTRATIONS.add(self._note_change)

    def refuse_at_updates(self) -> None:
        """Call `refuse_trained` and `refuse_converted` before each optimizer's step."""
        self._nodes = [(p, get_gradient_edge(p).node) for p in self._admitted.values() if p.numel()]
        BEFORE_UPDATES.add(self._before_update)

    def close(self) -> None:
        """Look at no more updates."""
        BEFORE_UPDATES.remove(self._before_update)

    def refuse_converted(self, optimizer: Optimizer) -> None:
        """Refuse an update of a model whose gradients DDP does not see any more.

        If a parameter's dtype changes, torch makes a new node for its gradient, which has none of
        DDP's hooks, even if the dtype changes back. A parametrization that sets a parameter's
        values does the same.

        Raises:
            RuntimeError: the model was converted, or a layer parametrized.
        """
        looked_at = self._nodes if self._is_parametrized else self._nodes[:1]
        self._is_parametrized = False
        changed = {
            id(p)
            for p, node in looked_at
            if p.requires_grad and get_gradient_edge(p).node is not node
        }
        if changed and not changed.isdisjoint(
            id(p) for group in optimizer.param_groups for p in group["params"]
        ):
            raise RuntimeError(
                "the model was converted to another dtype, or a layer parametrized, after "
                "DistributedDataParallel was made, which therefore does not see its gradients; "
                "convert a copy, or wrap the changed model"
            )

    def refuse_trained(self, optimizer: Optimizer | None = None) -> None:
        """Refuse a model in which one of them trains; call this in each step, after backward.

        Parameters that a model registered by itself are looked for until a backward has been seen,
        and later ones, added or in the place of others, once any module has registered something,
        or once one has another parameter, as Module.to gives all of them if torch.__future__ says
        so.

        Args:
            optimizer: only parameters that it updates count; None: all do.

        Raises:
            RuntimeError: names one that has a gradient, which no other rank would get.
        """
        is_replaced = self._place and self._place[0].get(self._place[1]) is not self._place[2]
        if self._has_changed or is_replaced or not self._has_trained:
            self._has_changed = False
            self._parameters = self._found()
            self._has_trained |= any(p.grad is not None for p in self._admitted.values())
        found = self._parameters.items()
        trained = [(n, p) for n, p in found if p.requires_grad and p.grad is not None]
        if trained and optimizer:
            updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
            trained = [(n, p) for n, p in trained if id(p) in updated]
        if trained:
            raise RuntimeError(
                f"{trained[0][0]}: was frozen or missing when the exchange was set up, so its "
                "gradient reaches no other rank; add or replace layers, and set "
                "requires_grad=True, before that (you can freeze parameters at any time)"
            )

    def _note_change(self, *_: object) -> None:
        self._has_changed = self._is_parametrized = True

    def _before_update(self, optimizer: Optimizer, *_: object) -> None:
        self.refuse_trained(optimizer)
        if not torch.compiler.is_compiling():
            self.refuse_converted(optimizer)

    def _found(self) -> dict[str, nn.Parameter]:
        admitted = {id(p) for p in self._admitted.values()}
        held = ((m._parameters, n) for m in self._model.modules() for n in m._parameters)
        # One for all: to look at each in every step would cost more than the rest.
        self._place = next(((d, n, d[n]) for d, n in held if id(d[n]) in admitted), None)
        return {n: p for n, p in named(self._model).items() if id(p) not in admitted}
