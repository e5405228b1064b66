"""The gate: which parameters an exchange takes, decided once, before the first step."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lab.exchange.base import ADDED, Exchange
from lab.exchange.layout import is_dense, trainable


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
