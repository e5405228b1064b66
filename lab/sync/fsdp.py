"""torch's FSDP2: weights, gradients and the optimizer's state sharded over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo

from lab.distributed import launcher
from lab.distributed.comm import Comm
from lab.distributed.nodes import Nodes
from lab.distributed.sharded import whole
from lab.distributed.torch_comm import TorchComm
from lab.exchange.layout import named
from lab.exchange.scatter import TwoLevels, require_no_residuals, scatter_of
from lab.settings import checks
from lab.sync.base import SyncParts
from lab.sync.drift import GRADIENTS, WEIGHTS, FsdpDrift
from lab.sync.fsdp_hooks import UnitAllGather, UnitReduceScatter, set_all_gather, set_reduce_scatter
from lab.sync.fsdp_units import (
    FreedReads,
    Reads,
    groups_of,
    modules_of_fsdp,
    prepare_for_sharding,
    replacing,
    require_scattered,
    sharded_parameters,
    state_of,
    units,
)
from lab.sync.library import LibrarySync
from lab.sync.pattern import GATHERS, SCATTERS, fsdp


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
        checks.one_of("sync.all_gather", all_gather, GATHERS)
        checks.one_of("sync.reduce_scatter", reduce_scatter, SCATTERS)
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
        scale = getattr(parts.model, "bytes_scale", 1.0)
        reads = None if parts.sample is None else Reads(parts.model, parts.sample)
        found = units(parts.model, parts.bucket_mb, scale, reads)
        with replacing(parts.model):
            self.units = [fully_shard(each, mesh=mesh) for each in found]
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
                self._reduce_scatter == "two_levels"
                and not any(isinstance(hook.scatter, TwoLevels) for hook in self._scatters)
            ),
        }
        return [line for line, holds in does_nothing.items() if holds]


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


def _padded_bytes(unit: FSDPModule, size: int) -> int:
    """Return the bytes that a unit's gather leaves: each first dimension a multiple of `size`."""
    return sum(
        -(-p.shape[0] // size) * size * (p.numel() // p.shape[0]) * p.element_size()
        for p in sharded_parameters(unit)
        if p.numel()
    )


@dataclass(frozen=True)
class Levels:
    """Groups of neighbouring ranks, and the ranks with one number in all of these."""

    inside: TorchComm
    across: TorchComm

    @classmethod
    def of(cls, comm: Comm, size: int) -> Levels:
        """Split `comm` into groups of `size`, a divisor of its ranks. A collective call."""
        inside, across = comm.split(comm.rank // size), comm.split(comm.rank % size)
        assert isinstance(inside, TorchComm) and isinstance(across, TorchComm)
        return cls(inside, across)

    def mesh(self) -> DeviceMesh:
        """Return torch's mesh [groups, ranks of a group]."""
        ranks = torch.arange(self.inside.size * self.across.size).view(-1, self.inside.size)
        groups, device = [self.across.group, self.inside.group], self.inside.device.type
        names = "replicate", "shard"
        return DeviceMesh.from_group(groups, device, mesh=ranks, mesh_dim_names=names)


class SecondShards:
    """Keeps gathered weights of FSDP units sharded inside groups from forward to backward.

    It is what fully_shard(reshard_after_forward=<int>) does, which would make process groups anew
    for each unit; here all units share those of `levels`.
    """

    def __init__(self, levels: Levels, units: Sequence[FSDPModule]) -> None:
        info = HSDPMeshInfo(levels.mesh(), shard_mesh_dim=1, replicate_mesh_dim=0)
        self._info, self._groups = info, [group for unit in units for group in groups_of(unit)]
        for group in self._groups:
            for parameter in group.fsdp_params:
                parameter.post_forward_mesh_info = info
                whole = torch.empty(parameter.sharded_param.shape, device="meta")
                parameter._init_sharded_post_forward_param_metadata(whole)
        self.use()

    def use(self) -> None:
        """Let units use it, also after set_reshard_after_forward."""
        for group in self._groups:
            group.post_forward_mesh_info = self._info


def levels_of_copies(shard_size: int | str | None, comm: TorchComm) -> Levels | None:
    """Return the groups that hold a copy of the weights each; None: there is one copy.

    Raises:
        ValueError: see FSDPSync.
    """
    size = shard_size if shard_size is not None else comm.size
    if shard_size == "node":
        size = launcher.local_size()
    size = _divisor("shard_size", size, shard_size, comm.size)
    return None if size == comm.size else Levels.of(comm, size)


def levels_of_second_shards(
    reshard: int | str | None, shard_size: int | str | None, comm: TorchComm
) -> Levels | None:
    """Return the groups that keep a second shard; None: nothing does.

    Raises:
        ValueError: see FSDPSync.
    """
    if reshard is None:
        return None
    key = f"sync.reshard={reshard}"
    if shard_size is not None:
        raise ValueError(f"{key}: sync.shard_size={shard_size} gathers within groups already")
    size = ranks_of_a_host(key, comm.nodes) if reshard == "node" else reshard
    size = _divisor("reshard", size, reshard, comm.size)
    if size == comm.size:
        return None
    if size == 1:
        raise ValueError(f"{key}: each rank would hold all weights; needs groups of 2 or more")
    return Levels.of(comm, size)


def levels_of_hosts(key: str, comm: TorchComm, known: Levels | None) -> Levels | None:
    """Return the hosts' ranks as two levels; None: there is one, all on a host or all alone.

    Args:
        key: the setting that needs them, for messages.
        known: groups that may be those.

    Raises:
        ValueError: see `ranks_of_a_host`.
    """
    size = ranks_of_a_host(key, comm.nodes)
    if size in (1, comm.size):
        return None
    return known if known and known.inside.size == size else Levels.of(comm, size)


def ranks_of_a_host(key: str, nodes: Nodes) -> int:
    """Return how many ranks each host has.

    Raises:
        ValueError: they have different numbers, or are not numbered one host after the other.
    """
    size, found = len(nodes[0]), [list(node) for node in nodes]
    if found != [list(range(at, at + size)) for at in range(0, len(nodes) * size, size)]:
        listed = ", ".join(map(str, found))
        raise ValueError(
            f"{key}: hosts have the ranks {listed}; each needs as many, numbered one host after "
            "the other"
        )
    return size


def _divisor(key: str, size: object, setting: object, ranks: int) -> int:
    if not checks.is_whole(size) or size < 1 or ranks % size:
        raise ValueError(
            f"sync.{key}={setting}: must be node, null, or a divisor of the {ranks} ranks"
        )
    return size


class WholeGradients:
    """Lets FSDP modules scatter gradients of all their trainable parameters, on all ranks alike.

    FSDP2 scatters those that there are, one after the other: where ranks reach different ones, it
    adds one parameter's gradient to another's. So a rank gives zeros for what it has not reached.
    After backward a parameter that no rank reached has no gradient, as without FSDP; one all-reduce
    of a byte for each parameter says so, and only ranks that lack a gradient read it.

    Gradients that come when a module's have been sent, as of a module that reentrant recomputation
    uses twice, are sent after the others; FSDP2 would forget them. Sparse ones are made dense.

    Backward raises a RuntimeError where another rank ran a module that this one did not.

    Args:
        model: after the last fully_shard. Of one that has this already, nothing changes.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = [module for _, module in modules_of_fsdp(model)]
        self._groups = [group for module in modules for group in groups_of(module)]
        self._ran: set[int] = set()  # ids of groups that have sent in this backward
        self._empty: set[int] = set()  # ids of parameters that had no gradient before it
        self._reached: set[int] = set()  # ids of those that this rank has reached
        self._all = torch.empty(0)  # flags of a rank that has reached all
        self._names = {id(parameter): name for name, parameter in named(model).items()}
        if any("post_backward" in vars(group) for group in self._groups):
            return
        for group in self._groups:
            group.post_backward = partial(self._send, group, group.post_backward)
        for module in modules:
            state = state_of(module)
            end = partial(self._end_backward, state._root_post_backward_final_callback)
            state._root_post_backward_final_callback = end

    def _send(self, group: Any, send: Callable[..., None], *_: object) -> None:
        if group.reduce_grads and group._training_state.name in ("FORWARD", "PRE_BACKWARD"):
            self._ran.add(id(group))
            for parameter in group.fsdp_params:
                if parameter.sharded_param.requires_grad:
                    self._complete(parameter)
        send()

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

    def _forget_zeros(self) -> None:
        """Take back zeros to which no rank added anything."""
        parameters = [
            (parameter, id(group) in self._ran)
            for group in self._groups
            for parameter in group.fsdp_params
            if parameter.sharded_param.requires_grad and parameter.sharded_param.numel()
        ]
        own = [id(parameter) in self._reached for parameter, _ in parameters]
        anywhere = self._flags(own)
        for group in self._process_groups():
            dist.all_reduce(anywhere, dist.ReduceOp.MAX, group)  # pyright: ignore[reportUnknownMemberType]
        if all(own):
            return
        reached = cast(list[int], anywhere.tolist())  # pyright: ignore[reportUnknownMemberType]
        for (parameter, ran), needed in zip(parameters, reached, strict=True):
            if needed and not ran:
                raise RuntimeError(
                    f"{self._names[id(parameter.sharded_param)]}: another rank's forward ran its "
                    "module and this rank's did not, but FSDP needs all ranks to run the same; "
                    "bucket_mb=null makes the model one unit"
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

    def _process_groups(self) -> list[dist.ProcessGroup]:
        """Return the groups over which all ranks meet: FSDP's own, and HSDP's between copies."""
        info = self._groups[0].mesh_info
        kinds = "shard_process_group", "replicate_process_group"
        return [getattr(info, kind) for kind in kinds if hasattr(info, kind)]


def _is_left(parameter: Any) -> bool:
    """Return whether a gradient came after its module's had been sent."""
    return hasattr(parameter, "_unsharded_param") and parameter.unsharded_param.grad is not None
