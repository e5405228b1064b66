"""Tensors that are sharded over ranks (torch's DTensor), as plain ones and back.

torch.distributed.tensor takes half a second to import, so it is imported where a tensor is sharded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    """Return whether a rank holds a part of `tensor` alone."""
    return hasattr(tensor, "full_tensor")


def whole(value: Any) -> Any:
    """Return `value` with all sharded tensors in it, also in dicts and lists, gathered.

    All ranks call this together if any tensor is sharded.
    """
    if isinstance(value, dict):
        return {key: whole(each) for key, each in value.items()}
    if isinstance(value, list):
        return [whole(each) for each in value]
    if isinstance(value, Tensor) and is_sharded(value):
        if not value.numel():  # DTensor mistakes the shape of a part
            return torch.empty_like(local(value)).reshape(value.shape)
        return value.full_tensor()  # type: ignore[attr-defined]
    return value


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of `tensor`; all of it if it is not sharded."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def like(value: Any, model: Tensor) -> Any:
    """Return `value`, sharded as `model` if that is, and `value` a tensor of its shape.

    Args: value: the same on all ranks.
    """
    if not is_sharded(model) or not isinstance(value, Tensor) or value.shape != model.shape:
        return value
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(model, DTensor)
    tensor = value.detach().to(model.device)
    return distribute_tensor(tensor, model.device_mesh, model.placements, src_data_rank=None)
