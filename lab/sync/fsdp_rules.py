"""Rules of FSDP2 for a model, beyond those of other ways to exchange, checked before wrapping."""

from __future__ import annotations

import gc
import weakref
from collections import defaultdict
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from lab.exchange.base import Exchange

SCATTERED = (torch.float32, torch.bfloat16, torch.float16)


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
