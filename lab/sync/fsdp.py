"""torch's FSDP2: weights, gradients and the optimizer's state sharded over the ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo
from torch.optim import Optimizer

from lab.distributed import launcher
from lab.distributed.comm import Comm, Traffic
from lab.distributed.launcher import Nodes
from lab.distributed.replicas import gathered
from lab.distributed.torch_comm import TorchComm
from lab.exchange.base import Exchange
from lab.exchange.bucket import Plans
from lab.exchange.layout import named
from lab.exchange.memory import Columns
from lab.exchange.scatter import (
    Scatter,
    ScatterLayout,
    TwoLevels,
    gather_bytes,
    require_no_residuals,
    scatter_of,
)
from lab.settings.errors import one_line
from lab.sync.base import SyncParts
from lab.sync.drift import GRADIENTS, WEIGHTS, FsdpDrift
from lab.sync.first_use import Reads
from lab.sync.fsdp_units import (
    FreedReads,
    WholeGradients,
    groups_of,
    modules_of_fsdp,
    prepare_for_sharding,
    replacing,
    require_scattered,
    sharded_parameters,
    units,
)
from lab.sync.library import LibrarySync
from lab.sync.pattern import fsdp, ranks_of_second_shard, sharing_ranks


class FSDPSync(LibrarySync):
    """A sync in which FSDP2 gathers weights where they are used, and reduce-scatters gradients.

    Its units (lab.sync.fsdp_units) are gathered in forward, freed, gathered again in backward, and
    their gradients reduce-scattered there. The model's own unit, the last one, stays gathered in
    between, as torch's default is. What the lab can do in torch's place are the parts of ZeRO++
    (Wang et al. 2023; docs/exchanges/sharding.md). What torch sends is computed, since it does
    not pass through a Comm; tests/distributed/test_wire.py compares it with what crossed.

    A `shard_size` below the number of ranks is HSDP: groups of neighbouring ranks hold a copy each,
    and all-reduce the sums of gradients between them. Settings: conf/sync/fsdp.yaml.

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
        pattern = fsdp(reduce_scatter, shard_size, all_gather, reshard)
        super().__init__("fsdp", parts, pattern, 0)
        comm = _checked(parts, all_gather)
        self._copies = _copies(shard_size, comm)
        self._sharers = self._copies.intra_node if self._copies else comm
        self._second = _second_shards(reshard, comm)
        self._num_micro_batches = 0
        self._wrap(parts, comm)
        self._gathers = list[UnitAllGather]()
        if all_gather == "int8":
            inside = self._second.intra_node if self._second else None
            self._gathers = set_all_gather(parts.model, self._sharers, inside)
        self._scatters = list[UnitReduceScatter]()
        if reduce_scatter != "torch":
            self._scatters = self._set_reduce_scatter(parts)
        self._drift: FsdpDrift | None = None
        self._first_reads: AbstractContextManager[Any] = FreedReads(parts.model)

    def _wrap(self, parts: SyncParts, comm: TorchComm) -> None:
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
        if self.pattern.reduce_scatter == "two_levels":
            require_no_residuals(parts.exchange)
            size = ranks_of_a_host("sync.reduce_scatter=two_levels", comm.nodes)
            if size not in (1, comm.size):  # else there is one level
                second = self._second
                fits = second and second.intra_node.size == size
                levels = second if second and fits else RankGroups.of(comm, size)
                make = partial(TwoLevels, inside=levels.intra_node, across=levels.inter_node)
        return set_reduce_scatter(parts.model, parts.exchange, comm.traffic, comm, make)

    def observe_drift(self, every: int) -> None:
        hooks = [(WEIGHTS, self._gathers), (GRADIENTS, self._scatters)]
        parts = [part for part, of_units in hooks if of_units]
        if not parts:
            raise ValueError(
                "torch sends all weights and gradients, but only the lab's exchanges can be "
                "checked; set sync.all_gather=int8 or sync.reduce_scatter=lab"
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

    def update(self, optimizer: Optimizer) -> None:
        try:
            super().update(optimizer)
        except (RuntimeError, NotImplementedError) as error:
            if not any(word in str(error) for word in ("placement", "DTensor", "sharding")):
                raise
            raise RuntimeError(
                f"strategy=fsdp: {type(optimizer).__name__} cannot update sharded weights "
                f"({one_line(error)[:120]}); use an elementwise optimizer such as AdamW, or "
                "another strategy"
            ) from error

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
        # A gather sends (N-1)/N of them. A reduce-scatter counts as much over NCCL, and twice over
        # Gloo, whose own is an all-reduce of which a part is kept.
        sharers = self._sharers
        if not self._gathers:
            again = self._second.intra_node if self._second else sharers
            for comm in [sharers] if unit is self._root else [sharers, again]:
                sent = (comm.size - 1) * num_bytes // comm.size
                comm.count_ring(self._num_micro_batches * sent, comm.size - 1)
        if not self._scatters and sharers.backend == "nccl":
            sent = (sharers.size - 1) * num_bytes // sharers.size
            sharers.count_ring(sent, sharers.size - 1)
        elif not self._scatters:
            sharers.count_all_reduce(num_bytes)
        if self._copies:
            self._copies.inter_node.count_all_reduce(num_bytes // sharers.size)

    def drift_found(self) -> list[dict[str, Any]] | None:
        return self._drift.results() if self._drift else None

    @property
    def waits_in(self) -> tuple[str, ...]:
        return "forward", "backward"

    def norm(self, own: Tensor) -> Tensor:
        return gathered(own)

    @contextmanager
    def evaluating(self) -> Generator[None]:
        """Hold all weights gathered, since ranks may have different numbers of test batches.

        They are gathered exactly, as a checkpoint holds them.
        """
        for hook in self._gathers:
            hook.exact = True
        for unit in self.units:
            unit.set_reshard_after_forward(False, recurse=False)
            unit.unshard()
        yield
        for hook in self._gathers:
            hook.exact = False
        for unit in self.units:
            unit.set_reshard_after_forward(unit is not self._root, recurse=False)
            unit.reshard()
        if self._second_shards:
            self._second_shards.use()

    def ineffective(self) -> list[str]:
        here = "all ranks are on one host"
        does_nothing = {
            f"sync.shard_size=node: {here}, so there is one copy, as with strategy=fsdp": (
                self.pattern.shard_size == "node" and not self._copies
            ),
            f"sync.reshard=node: {here}, which stores the weights only once in any case": (
                self.pattern.reshard == "node" and not self._second
            ),
            "sync.reduce_scatter=two_levels: there is one host, or each host has one rank, so "
            "there is only one level, as with sync.reduce_scatter=lab": (
                self.pattern.reduce_scatter == "two_levels"
                and not any(isinstance(hook.scatter, TwoLevels) for hook in self._scatters)
            ),
        }
        return [line for line, holds in does_nothing.items() if holds]


def _checked(parts: SyncParts, all_gather: str) -> TorchComm:
    """Return the comm of FSDP's groups. ValueError: see FSDPSync."""
    if not isinstance(parts.comm, TorchComm):
        raise ValueError("strategy=fsdp: runs only over torch.distributed; use comm=torch")
    if parts.module is not parts.model:
        raise ValueError("compile=true: not supported with strategy=fsdp; must be false")
    if parts.precision == "fp16" and parts.exchange.keeps_residuals:
        raise ValueError(
            f"precision=fp16: exchange={type(parts.exchange).__name__} needs unscaled "
            "gradients, but FSDP scatters scaled ones; allowed: fp32, bf16"
        )
    types = {p.dtype for p in parts.model.parameters()}
    if all_gather == "int8" and any(each.itemsize != 4 for each in types):
        listed = ", ".join(sorted(str(each).removeprefix("torch.") for each in types))
        raise ValueError(
            f"sync.all_gather=int8: needs float32 weights, but the model's are {listed}"
        )
    return parts.comm


def _padded_bytes(unit: FSDPModule, size: int) -> int:
    """Return the bytes that a unit's gather leaves: each first dimension a multiple of `size`."""
    return sum(
        -(-p.shape[0] // size) * size * (p.numel() // p.shape[0]) * p.element_size()
        for p in sharded_parameters(unit)
        if p.numel()
    )


@dataclass(frozen=True)
class RankGroups:
    """Groups of neighbouring ranks, and the ranks with one number in all of these."""

    intra_node: TorchComm
    inter_node: TorchComm

    @classmethod
    def of(cls, comm: Comm, size: int) -> RankGroups:
        """Split `comm` into groups of `size`, a divisor of its ranks. A collective call."""
        inside, across = comm.split(comm.rank // size), comm.split(comm.rank % size)
        assert isinstance(inside, TorchComm) and isinstance(across, TorchComm)
        return cls(inside, across)

    def mesh(self) -> DeviceMesh:
        """Return torch's mesh [groups, ranks of a group]."""
        ranks = torch.arange(self.intra_node.size * self.inter_node.size).view(
            -1, self.intra_node.size
        )
        groups, device = [self.inter_node.group, self.intra_node.group], self.intra_node.device.type
        names = "replicate", "shard"
        return DeviceMesh.from_group(groups, device, mesh=ranks, mesh_dim_names=names)


class SecondShards:
    """Keeps gathered weights of FSDP units sharded inside groups from forward to backward.

    It is what fully_shard(reshard_after_forward=<int>) does, which would make process groups anew
    for each unit; here all units share those of `levels`.
    """

    def __init__(self, levels: RankGroups, units: Sequence[FSDPModule]) -> None:
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


def _copies(shard_size: int | str | None, comm: TorchComm) -> RankGroups | None:
    """Return the groups that hold a copy of the weights each; None: there is one copy."""
    size = sharing_ranks("shard_size", shard_size, comm.size, launcher.local_size)
    return None if size == comm.size else RankGroups.of(comm, size)


def _second_shards(reshard: int | str | None, comm: TorchComm) -> RankGroups | None:
    """Return the groups that keep a second shard; None: nothing does."""
    local = partial(ranks_of_a_host, f"sync.reshard={reshard}", comm.nodes)
    size = ranks_of_second_shard(reshard, comm.size, local)
    return RankGroups.of(comm, size) if size else None


def ranks_of_a_host(key: str, nodes: Nodes) -> int:
    """Return how many ranks each host has; all must have as many, one host after the other."""
    size, found = len(nodes[0]), [list(node) for node in nodes]
    if found != [list(range(at, at + size)) for at in range(0, len(nodes) * size, size)]:
        listed = ", ".join(map(str, found))
        raise ValueError(
            f"{key}: hosts have the ranks {listed}; every host needs the same number of ranks, "
            "and ranks must be numbered host by host"
        )
    return size


class UnitHook:
    """A collective of one FSDP module.

    Attributes:
        unit: name of the module.
        drift: watches what the collective delivers; None: nobody does.
    """

    def __init__(self, unit: str) -> None:
        self.unit = unit
        self.drift: FsdpDrift | None = None

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class UnitAllGather(UnitHook):
    """An AllGather (torch.distributed.fsdp, set_custom_all_gather) of one FSDP module, in bytes.

    It is ZeRO++'s qwZ (Wang et al. 2023, section 4.1): all ranks decode all parts, their own too,
    so copies are equal on all ranks. The part that the optimizer updates is another tensor and
    stays exact. A second shard inside a node is gathered exactly: backward has forward's bits.

    Args:
        comm: the ranks that share the weights.
        inside: those that share the second shard; None: there is none.
        plans: layouts and memory for messages, which all modules of a rank share: FSDP gathers one
            after the other.
    """

    def __init__(self, unit: str, comm: Comm, inside: Comm | None, plans: Plans) -> None:
        super().__init__(unit)
        self._comm, self._inside, self._plans = comm, inside, plans
        self.exact = False  # evaluations are of the weights that checkpoints hold

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        """Fill `output_tensor` [N * n] with all ranks' `input_tensor` [n], a part of it."""
        if self._inside is not None and group.size() == self._inside.size:
            self._inside.all_gather(output_tensor, input_tensor)
        elif self.exact:
            self._comm.all_gather(output_tensor, input_tensor)
        elif self.drift and self.drift.compares_weights(self.unit):
            own = input_tensor.clone()  # it is a part of the output
            self._gather(output_tensor, input_tensor)
            self.drift.gathered(self.unit, own, output_tensor, self._comm)
        else:
            self._gather(output_tensor, input_tensor)

    def _gather(self, output: Tensor, own: Tensor) -> None:
        gather_bytes(output, own, self._comm, self._plans)


def set_all_gather(model: nn.Module, comm: Comm, inside: Comm | None) -> list[UnitAllGather]:
    """Give each FSDP module in `model` an all-gather in bytes; return these."""
    made, plans = list[UnitAllGather](), Plans()
    for unit, module in modules_of_fsdp(model):
        made.append(UnitAllGather(unit, comm, inside, plans))
        module.set_custom_all_gather(made[-1])  # pyright: ignore[reportArgumentType]
    return made


class UnitReduceScatter(UnitHook):
    """A ReduceScatter (torch.distributed.fsdp, set_custom_reduce_scatter) of one FSDP module.

    It runs in FSDP's own group and stream, as FSDP's does. What it sums is float32; other types are
    converted before and after. Under `op` AVG, which FSDP asks for unless told otherwise, the sum
    is divided by the number of ranks.

    Args:
        parameters: of the module, sharded, in its order, as the whole model names them.
        traffic: counts what it sends.
        comm: the ranks that share the weights; None: made of FSDP's group when it is known.
    """

    def __init__(
        self,
        scatter: Scatter,
        unit: str,
        parameters: Mapping[str, nn.Parameter],
        traffic: Traffic,
        comm: Comm | None = None,
    ) -> None:
        super().__init__(unit)
        self.scatter, self._traffic = scatter, traffic
        self._parameters, self._comm = parameters, comm
        self._layout: ScatterLayout | None = None

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> None:
        """Fill `output_tensor` [n] with the sum or mean of all ranks' `input_tensor` [N * n].

        Raises:
            ValueError: `op` is neither of these.
        """
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ValueError(
                "FSDP asks for neither a sum nor a mean, as after set_gradient_divide_factor(); "
                "lab.fsdp_reduce_scatter supports only these"
            )
        if self._comm is None:
            self._comm = TorchComm(group, group, input_tensor.device)
            self._comm.traffic = self._traffic
        size = self._comm.size
        output = output_tensor.float()  # itself, if it is
        gradients = input_tensor.float().view(size, -1)
        # FSDP hands over the gradients of parameters that are trained now.
        own = {n: p for n, p in self._parameters.items() if p.requires_grad and p.numel()}
        if self._layout is None or own.keys() != self._layout.columns.keys():
            self._layout = ScatterLayout(_columns(own, size))
        layout = self._layout
        if self.drift:
            self.drift.giving(self.unit, gradients, layout)
        self.scatter.sum(output, gradients, self._comm, layout)
        if self.drift:
            self.drift.given(self.unit, output, layout, self._comm)
        if op == dist.ReduceOp.AVG:
            output.div_(size)
        if output is not output_tensor:
            output_tensor.copy_(output)


def set_reduce_scatter(
    model: nn.Module,
    exchange: Exchange,
    traffic: Traffic,
    comm: Comm | None = None,
    scatter: Callable[[Exchange], Scatter] = scatter_of,
) -> list[UnitReduceScatter]:
    """Give each FSDP module in `model` a reduce-scatter in the codec of `exchange`; return these.

    Raises:
        ValueError: no module is one of FSDP2, or the exchange has no reduce-scatter.
    """
    made = list[UnitReduceScatter]()
    name_of = {id(parameter): name for name, parameter in named(model).items()}
    for unit, module in modules_of_fsdp(model):
        own = {name_of[id(parameter)]: parameter for parameter in sharded_parameters(module)}
        of_unit = UnitReduceScatter(scatter(exchange), unit, own, traffic, comm)
        module.set_custom_reduce_scatter(of_unit)  # pyright: ignore[reportArgumentType]
        made.append(of_unit)
    if not made:
        raise ValueError(
            f"{type(model).__name__} contains no module that FSDP2's fully_shard wrapped"
        )
    return made


def _columns(parameters: Mapping[str, nn.Parameter], size: int) -> dict[str, Columns]:
    """Return where FSDP puts parameters: each divided by one dimension, rounded up."""
    columns, start = dict[str, Columns](), 0
    for name, parameter in parameters.items():
        *_, placement = getattr(parameter, "placements", (None,))  # the last is the shard's
        divided = 0 if placement is None else placement.dim
        shape = list(parameter.shape)
        shape[divided] = -(-shape[divided] // size)
        stop = start + math.prod(shape)
        columns[name] = Columns(start, stop, math.prod(shape[1:]))
        start = stop
    return columns
