"""torch's FSDP2: weights, gradients and the optimizer's state sharded over the ranks."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from lab.distributed import launcher
from lab.distributed.comm import Comm
from lab.distributed.sharded import whole
from lab.distributed.torch_comm import TorchComm
from lab.exchange.error_feedback import ErrorFeedback
from lab.sync.base import SyncParts
from lab.sync.fsdp_scatter import set_reduce_scatter, sharded_parameters
from lab.sync.fsdp_units import units
from lab.sync.library import LibrarySync
from lab.sync.pattern import fsdp


class FSDPSync(LibrarySync):
    """A sync in which FSDP2 gathers weights where they are used, and reduce-scatters gradients.

    Its units (lab.sync.fsdp_units) are gathered in forward, freed, gathered again in backward, and
    their gradients reduce-scattered there. The model's own unit, the last one, stays gathered in
    between, as torch's default is.

    Its payload is computed: (N-1)/N of a unit's padded bytes for each gather. A reduce-scatter
    counts as much over NCCL, and twice over Gloo, whose own is an all-reduce of which a part is
    kept. tests/distributed/test_wire.py compares the sum with the bytes that crossed.

    Args:
        shard_size: ranks that share a copy of the weights; null: all. Fewer: HSDP, in which groups
            of neighbouring ranks hold a copy each, and all-reduce the sums of gradients between
            them. "node": the ranks of a host.

    Raises:
        ValueError: settings that FSDP does not support, or a size that does not divide the ranks.
    """

    def __init__(
        self, parts: SyncParts, *, shard_size: int | str | None, reduce_scatter: str
    ) -> None:
        if reduce_scatter not in ("torch", "lab"):
            raise ValueError(f"sync.reduce_scatter={reduce_scatter}: allowed are torch, lab")
        super().__init__("fsdp", parts, fsdp(reduce_scatter, shard_size), 0)
        comm = _checked(parts)
        self._sharers, mesh = _mesh(comm, _ranks_of_a_copy(shard_size, comm.size))
        self.units = [_wrapped(each, mesh) for each in _units(parts)]
        self._root, self._shard_size = self.units[-1], shard_size
        self._bytes = [_padded_bytes(unit, self._sharers.size) for unit in self.units]
        self._num_micro_batches = 0
        self._counts_scatters = reduce_scatter == "torch"
        if reduce_scatter == "lab":
            set_reduce_scatter(parts.model, parts.exchange, comm.traffic)

    @contextmanager
    def micro_batch(self, last: bool) -> Generator[None]:
        """Enclose one micro-batch. Only the last one's gradients are exchanged."""
        self._root.set_requires_gradient_sync(last)
        self._root.set_is_last_backward(last)
        self._num_micro_batches += 1
        yield

    def finish(self) -> Tensor | None:
        """Count what FSDP sent; backward has exchanged the gradients."""
        self._unscale()
        traffic = self.comm.traffic
        for part in self._payload():
            traffic.payload_bytes += part
            traffic.num_messages += self._sharers.size - 1
        self._num_micro_batches = 0
        self.step += 1
        return None

    @property
    def waits_in(self) -> tuple[str, ...]:
        return "forward", "backward"

    def norm(self, own: Tensor) -> Tensor:
        return whole(own)

    @contextmanager
    def evaluating(self) -> Generator[None]:
        """Hold all weights gathered, since ranks may have different numbers of test batches."""
        for unit in self.units:
            unit.set_reshard_after_forward(False, recurse=False)
            unit.unshard()
        yield
        for unit in self.units:
            unit.set_reshard_after_forward(unit is not self._root, recurse=False)
            unit.reshard()

    def idle(self) -> list[str]:
        if self._shard_size != "node" or self._sharers.size < self.comm.size:
            return []
        return ["sync.shard_size=node: all ranks are on one host, so there is one copy, as in fsdp"]

    def _payload(self) -> Iterator[int]:
        """Yield the bytes of each collective of a step."""
        size, copies = self._sharers.size, self.comm.size // self._sharers.size
        for unit, num_bytes in zip(self.units, self._bytes, strict=True):
            part = num_bytes // size
            gathers = self._num_micro_batches * (1 if unit is self._root else 2)
            yield from [(size - 1) * part] * gathers
            if self._counts_scatters:
                yield (size - 1) * part * (1 if self._sharers.backend == "nccl" else 2)
            yield 2 * (copies - 1) * part // copies


def _checked(parts: SyncParts) -> TorchComm:
    """Return the comm of FSDP's groups. ValueError: see FSDPSync."""
    if not isinstance(parts.comm, TorchComm):
        raise ValueError("strategy=fsdp: runs over torch.distributed only")
    if parts.module is not parts.model:
        raise ValueError("compile=true: is not supported with strategy=fsdp")
    if parts.precision == "fp16" and isinstance(parts.exchange, ErrorFeedback):
        raise ValueError(
            f"precision=fp16: exchange={type(parts.exchange).__name__} keeps residuals in true "
            "units, and FSDP scatters scaled gradients; allowed are fp32, bf16"
        )
    if not parts.overlap:
        raise ValueError("overlap=false: strategy=fsdp always exchanges during backward")
    return parts.comm


def _units(parts: SyncParts) -> list[nn.Module]:
    return units(parts.model, parts.bucket_mb, getattr(parts.model, "bytes_scale", 1.0))


def _ranks_of_a_copy(shard_size: int | str | None, size: int) -> int:
    """Return the number of ranks that share a copy. ValueError: see FSDPSync."""
    if shard_size is None:
        return size
    chosen = launcher.local_size() if shard_size == "node" else shard_size
    if not isinstance(chosen, int) or isinstance(chosen, bool) or chosen < 1 or size % chosen:
        raise ValueError(
            f"sync.shard_size={shard_size}: must be node, null, or a divisor of the {size} ranks"
        )
    return chosen


def _mesh(comm: TorchComm, sharers: int) -> tuple[Comm, DeviceMesh]:
    """Return the ranks that share this one's copy, and torch's mesh of all."""
    device = comm.device.type
    if sharers == comm.size:
        return comm, DeviceMesh.from_group(comm.group, device)
    of_copy, across = comm.split(comm.rank // sharers), comm.split(comm.rank % sharers)
    assert isinstance(of_copy, TorchComm) and isinstance(across, TorchComm)
    ranks = torch.arange(comm.size).view(-1, sharers)
    names = "replicate", "shard"
    groups = [across.group, of_copy.group]
    return of_copy, DeviceMesh.from_group(groups, device, mesh=ranks, mesh_dim_names=names)


def _wrapped(module: nn.Module, mesh: DeviceMesh) -> FSDPModule:
    wrapped = fully_shard(module, mesh=mesh)
    assert isinstance(wrapped, FSDPModule)
    return wrapped


def _padded_bytes(unit: FSDPModule, size: int) -> int:
    """Return the bytes that a unit's gather leaves: each first dimension a multiple of `size`."""
    return sum(
        -(-p.shape[0] // size) * size * (p.numel() // p.shape[0]) * p.element_size()
        for p in sharded_parameters(unit)
        if p.numel()
    )
