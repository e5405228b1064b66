"""torch's FSDP2: weights, gradients and the optimizer's state sharded over the ranks."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from lab.distributed.sharded import whole
from lab.distributed.torch_comm import TorchComm
from lab.exchange.scatter import scatter_of
from lab.exchange.two_levels import TwoLevels, require_no_residuals
from lab.sync.base import SyncParts
from lab.sync.fsdp_drift import GRADIENTS, WEIGHTS, FsdpDrift
from lab.sync.fsdp_gather import UnitAllGather, set_all_gather
from lab.sync.fsdp_gradients import WholeGradients
from lab.sync.fsdp_levels import (
    SecondShards,
    levels_of_copies,
    levels_of_hosts,
    levels_of_second_shards,
)
from lab.sync.fsdp_rules import FreedReads, prepare_for_sharding, replacing, require_scattered
from lab.sync.fsdp_scatter import UnitReduceScatter, set_reduce_scatter
from lab.sync.fsdp_units import Reads, sharded_parameters, units
from lab.sync.library import LibrarySync
from lab.sync.pattern import fsdp


class FSDPSync(LibrarySync):
    """A sync in which FSDP2 gathers weights where they are used, and reduce-scatters gradients.

    Its units (lab.sync.fsdp_units) are gathered in forward, freed, gathered again in backward, and
    their gradients reduce-scattered there. The model's own unit, the last one, stays gathered in
    between, as torch's default is. What the lab can do in torch's place are the parts of ZeRO++
    (Wang et al. 2023).

    What torch sends is computed: (N-1)/N of a unit's padded bytes for each gather. A reduce-scatter
    counts as much over NCCL, and twice over Gloo, whose own is an all-reduce of which a part is
    kept. tests/distributed/test_wire.py compares the sum with the bytes that crossed. What the lab
    sends is counted by its comms.

    Args:
        shard_size: ranks that share a copy of the weights; null: all. Fewer: HSDP, in which groups
            of neighbouring ranks hold a copy each, and all-reduce the sums of gradients between
            them. "node": the ranks of a host.
        all_gather: "torch", or "int8": weights travel as bytes, see UnitAllGather (qwZ).
        reshard: ranks of a group in which gathered weights stay sharded after forward, so that
            backward gathers them within it (hpZ); null: all. "node": the ranks of a host.
        reduce_scatter: "torch", "lab": by the exchange, or "two_levels": by the exchange inside
            each host and then between hosts (qgZ).

    Raises:
        ValueError: settings that FSDP does not support, or a size that does not divide the ranks.
    """

    def __init__(
        self,
        parts: SyncParts,
        *,
        shard_size: int | str | None,
        all_gather: str,
        reshard: int | str | None,
        reduce_scatter: str,
    ) -> None:
        _check_choice("all_gather", all_gather, "torch", "int8")
        _check_choice("reduce_scatter", reduce_scatter, "torch", "lab", "two_levels")
        super().__init__("fsdp", parts, fsdp(reduce_scatter, shard_size), 0)
        comm = _checked(parts, all_gather)
        self._copies = levels_of_copies(shard_size, comm)
        self._sharers = self._copies.inside if self._copies else comm
        self._second = levels_of_second_shards(reshard, shard_size, comm)
        self._num_micro_batches = 0
        self._shard_size, self._reshard, self._reduce_scatter = shard_size, reshard, reduce_scatter
        self._wrap(parts, comm)
        self._gathers = list[UnitAllGather]()
        if all_gather == "int8":
            inside = self._second.inside if self._second else None
            self._gathers = set_all_gather(parts.model, self._sharers, inside)
        self._scatters = list[UnitReduceScatter]()
        if reduce_scatter != "torch":
            self._scatters = self._set_reduce_scatter(parts)
        self._drift: FsdpDrift | None = None
        self._first_reads: AbstractContextManager[Any] = FreedReads(parts.model)

    def _wrap(self, parts: SyncParts, comm: TorchComm) -> None:
        """Let FSDP2 shard the units."""
        group = partial(DeviceMesh.from_group, comm.group, comm.device.type)
        mesh = self._copies.mesh() if self._copies else group()
        prepare_for_sharding(parts.model)
        with replacing(parts.model):
            self.units = [_wrapped(each, mesh) for each in _units(parts)]
        WholeGradients(parts.model)
        *inner, self._root = self.units
        self._second_shards = SecondShards(self._second, inner) if self._second else None
        self._bytes = [_padded_bytes(unit, self._sharers.size) for unit in self.units]

    def _set_reduce_scatter(self, parts: SyncParts) -> list[UnitReduceScatter]:
        require_scattered(parts.model, parts.exchange)
        make, comm = scatter_of, self._sharers
        if self._reduce_scatter == "two_levels":
            require_no_residuals(parts.exchange)
            levels = levels_of_hosts("sync.reduce_scatter=two_levels", comm, self._second)
            if levels:
                make = partial(TwoLevels, inside=levels.inside, across=levels.across)
        return set_reduce_scatter(parts.model, parts.exchange, comm.traffic, comm, make)

    def observe_drift(self, every: int) -> None:
        hooks = [(WEIGHTS, self._gathers), (GRADIENTS, self._scatters)]
        parts = [part for part, of_units in hooks if of_units]
        if not parts:
            raise ValueError(
                "torch moves weights and gradients; needs sync.all_gather=int8 or "
                "sync.reduce_scatter=lab"
            )
        names = [hook.unit for hook in self._gathers or self._scatters]
        self._drift = FsdpDrift(self.exchange, self.comm, every, names, parts)
        for hook in (*self._gathers, *self._scatters):
            hook.drift = self._drift

    @contextmanager
    def micro_batch(self, last: bool) -> Generator[None]:
        """Enclose one micro-batch. Only the last one's gradients are exchanged."""
        self._root.set_requires_gradient_sync(last)
        self._root.set_is_last_backward(last)
        if self._drift and not self._num_micro_batches:
            self._drift.begin_step(self.step)
        self._num_micro_batches += 1
        with self._first_reads:
            yield
        self._first_reads = nullcontext()

    def finish(self) -> Tensor | None:
        """Count what torch sent; backward has exchanged the gradients."""
        self._unscale()
        for unit, num_bytes in zip(self.units, self._bytes, strict=True):
            self._count(unit, num_bytes)
        if self._drift:
            self._drift.end_step()
        self._num_micro_batches = 0
        self.step += 1
        return None

    def _count(self, unit: FSDPModule, num_bytes: int) -> None:
        """Count torch's collectives of a step for a unit of `num_bytes`, padded."""
        sharers = self._sharers
        if not self._gathers:
            again = self._second.inside if self._second else sharers
            for comm in [sharers] if unit is self._root else [sharers, again]:
                sent = (comm.size - 1) * num_bytes // comm.size
                comm.count_ring(self._num_micro_batches * sent, comm.size - 1)
        if not self._scatters and sharers.backend == "nccl":
            sent = (sharers.size - 1) * num_bytes // sharers.size
            sharers.count_ring(sent, sharers.size - 1)
        elif not self._scatters:
            sharers.count_all_reduce(num_bytes)
        if self._copies:
            self._copies.across.count_all_reduce(num_bytes // sharers.size)

    def drift_found(self) -> list[dict[str, Any]] | None:
        return self._drift.results() if self._drift else None

    @property
    def waits_in(self) -> tuple[str, ...]:
        return "forward", "backward"

    def norm(self, own: Tensor) -> Tensor:
        return whole(own)

    @contextmanager
    def evaluating(self) -> Generator[None]:
        """Hold all weights gathered, since ranks may have different numbers of test batches.

        They are gathered exactly, as a checkpoint holds them.
        """
        self._gather_exactly(True)
        for unit in self.units:
            unit.set_reshard_after_forward(False, recurse=False)
            unit.unshard()
        yield
        self._gather_exactly(False)
        for unit in self.units:
            unit.set_reshard_after_forward(unit is not self._root, recurse=False)
            unit.reshard()
        if self._second_shards:
            self._second_shards.use()

    def _gather_exactly(self, exact: bool) -> None:
        for hook in self._gathers:
            hook.exact = exact

    def idle(self) -> list[str]:
        here = "all ranks are on one host"
        does_nothing = {
            f"sync.shard_size=node: {here}, so there is one copy, as in fsdp": (
                self._shard_size == "node" and not self._copies
            ),
            f"sync.reshard=node: {here}, which holds the weights once anyway": (
                self._reshard == "node" and not self._second
            ),
            "sync.reduce_scatter=two_levels: hosts are one, or have one rank each, so there is one "
            "level, as with lab": (
                self._reduce_scatter == "two_levels" and not _has_levels(self._scatters)
            ),
        }
        return [line for line, holds in does_nothing.items() if holds]


def _has_levels(scatters: list[UnitReduceScatter]) -> bool:
    return any(isinstance(hook.scatter, TwoLevels) for hook in scatters)


def _check_choice(key: str, value: object, *allowed: str) -> None:
    if value not in allowed:
        raise ValueError(f"sync.{key}={value}: allowed are {', '.join(allowed)}")


def _checked(parts: SyncParts, all_gather: str) -> TorchComm:
    """Return the comm of FSDP's groups. ValueError: see FSDPSync."""
    if not isinstance(parts.comm, TorchComm):
        raise ValueError("strategy=fsdp: runs over torch.distributed only")
    if parts.module is not parts.model:
        raise ValueError("compile=true: is not supported with strategy=fsdp")
    if parts.precision == "fp16" and parts.exchange.keeps_residuals:
        raise ValueError(
            f"precision=fp16: exchange={type(parts.exchange).__name__} needs gradients in true "
            "units, and FSDP scatters scaled ones; allowed are fp32, bf16"
        )
    if not parts.overlap:
        raise ValueError("overlap=false: strategy=fsdp always exchanges during backward")
    types = {p.dtype for p in parts.model.parameters()}
    if all_gather == "int8" and any(each.itemsize != 4 for each in types):
        listed = ", ".join(sorted(str(each).removeprefix("torch.") for each in types))
        raise ValueError(f"sync.all_gather=int8: gathers float32; the model's weights are {listed}")
    return parts.comm


def _units(parts: SyncParts) -> list[nn.Module]:
    reads = None if parts.sample is None else Reads(parts.model, parts.sample)
    return units(parts.model, parts.bucket_mb, getattr(parts.model, "bytes_scale", 1.0), reads)


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
