"""Replicas: made equal at the start, compared at the end; sharded tensors (DTensor), made whole.

torch.distributed.tensor takes half a second to import, so it is imported where a tensor is sharded.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, nn

from lab.distributed.world import World


def is_sharded(tensor: Tensor) -> bool:
    """Return whether a rank holds a part of `tensor` alone."""
    return hasattr(tensor, "full_tensor")


def gathered(value: Any) -> Any:
    """Return `value` with all sharded tensors in it, also in dicts and lists, gathered.

    All ranks call this together if any tensor is sharded.
    """
    if isinstance(value, dict):
        return {key: gathered(each) for key, each in value.items()}
    if isinstance(value, list):
        return [gathered(each) for each in value]
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


class ReplicaMismatch(RuntimeError):
    """The weights of two ranks differ."""


def broadcast_state(model: nn.Module, world: World) -> None:
    """Broadcast rank 0's weights and buffers, in whatever layout and dtype they are."""
    for tensor in (*model.parameters(), *model.buffers()):
        _broadcast(tensor, world)


def broadcast_buffers(model: nn.Module, world: World) -> None:
    """Broadcast rank 0's buffers.

    BatchNorm's running statistics are local to a rank during training; evaluations and checkpoints
    take rank 0's. This is not step traffic, so it is not counted.
    """
    with world.comm.traffic.uncounted():
        for buffer in model.buffers():
            _broadcast(buffer, world)


@torch.no_grad()
def _broadcast(tensor: torch.Tensor, world: World) -> None:
    """Replace a tensor's values by rank 0's. They travel as bytes, in logical order."""
    if tensor.layout != torch.strided:
        received = tensor.to_dense()
        _broadcast(received, world)
        if not torch.equal(received, tensor.to_dense()):  # ranks may store other zeros
            tensor.copy_(received.to_sparse(layout=tensor.layout))
        return
    for dim, stride in enumerate(tensor.stride()):
        if not stride and tensor.shape[dim]:  # expanded: one of equal values can be written to
            tensor = tensor.narrow(dim, 0, 1)
    sent = tensor.resolve_conj().resolve_neg().contiguous()
    if sent.numel():
        flat = sent.as_strided((sent.numel(),), (1,))
        world.comm.broadcast(flat.view(torch.uint8), 0)
    if sent.data_ptr() != tensor.data_ptr():
        tensor.copy_(sent)


def replica_hash(model: nn.Module, world: World) -> str:
    """Hash all weights (SHA-256), after checking that every rank has the same bits.

    Raises:
        ReplicaMismatch: names the first parameter that differs, and the ranks.
    """
    names = [name for name, _ in model.named_parameters()]
    digests = [_digest(gathered(parameter)) for parameter in model.parameters()]
    hashes = torch.tensor([list(digest) for digest in digests], dtype=torch.uint8)
    all_hashes = world.gather(hashes)  # [ranks, parameters, 32]
    for index, name in enumerate(names):
        same = (all_hashes[:, index] == all_hashes[0, index]).all(dim=1)
        if not same.all():
            ranks = [rank for rank, equal in enumerate(same.tolist()) if not equal]
            raise ReplicaMismatch(
                f"replicas differ: {name} on ranks {ranks} is not equal to rank 0's"
            )
    return hashlib.sha256(b"".join(digests)).hexdigest()


def _digest(tensor: torch.Tensor) -> bytes:
    data = tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(data.data).digest()
