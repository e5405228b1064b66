"""The lab's reduce-scatter and all-gather in torch's FSDP2, one object for each FSDP module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lab.distributed.comm import Comm, Traffic
from lab.distributed.torch_comm import TorchComm
from lab.exchange.base import Exchange
from lab.exchange.bucket import Plans
from lab.exchange.layout import named
from lab.exchange.memory import Columns
from lab.exchange.scatter import Layout, Scatter, gather_bytes, scatter_of
from lab.sync.drift import FsdpDrift
from lab.sync.fsdp_units import modules_of_fsdp, sharded_parameters


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
        """Return memory for what FSDP hands over or receives."""
        return torch.empty(*size, dtype=dtype, device=device)


class UnitAllGather(UnitHook):
    """An AllGather (torch.distributed.fsdp, set_custom_all_gather) of one FSDP module, in bytes.

    It is ZeRO++'s qwZ (Wang et al. 2023, section 4.1): each rank encodes its part of the weights
    by blocks, a byte for each value, and all ranks decode all parts, their own too, so copies are
    equal on all ranks. The part that the optimizer updates is another tensor and stays exact.

    Where weights have a second shard inside a node, it gathers what was gathered before, and inside
    the node: exactly, so that backward has the bits of forward.

    Args:
        unit: name of the module.
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
            own = input_tensor.clone()
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
        unit: name of the module.
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
        self._layout: Layout | None = None

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
            raise ValueError(f"{op}: the lab's reduce-scatter knows SUM and AVG")
        if self._comm is None:
            self._comm = TorchComm(group, group, input_tensor.device)
            self._comm.traffic = self._traffic
        size = self._comm.size
        output = output_tensor.float()  # itself, if it is
        gradients, layout = input_tensor.float().view(size, -1), self._layout_of(size)
        if self.drift:
            self.drift.giving(self.unit, gradients, layout)
        self.scatter.sum(output, gradients, self._comm, layout)
        if self.drift:
            self.drift.given(self.unit, output, layout, self._comm)
        if op == dist.ReduceOp.AVG:
            output.div_(size)
        if output is not output_tensor:
            output_tensor.copy_(output)

    def _layout_of(self, size: int) -> Layout:
        """Return where gradients lie: FSDP hands over those of parameters that are trained now."""
        own = {n: p for n, p in self._parameters.items() if p.requires_grad and p.numel()}
        if self._layout is None or own.keys() != self._layout.columns.keys():
            self._layout = Layout(_columns(own, size))
        return self._layout


def set_reduce_scatter(
    model: nn.Module,
    exchange: Exchange,
    traffic: Traffic,
    comm: Comm | None = None,
    scatter: Callable[[Exchange], Scatter] = scatter_of,
) -> list[UnitReduceScatter]:
    """Give each FSDP module in `model` a reduce-scatter in the codec of `exchange`; return these.

    Args:
        comm: see UnitReduceScatter.
        scatter: makes each module's.

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
        raise ValueError(f"{type(model).__name__}: holds no module of FSDP2's fully_shard")
    return made


def _columns(parameters: Mapping[str, nn.Parameter], size: int) -> dict[str, Columns]:
    """Return where FSDP puts parameters: each divided by its first dimension, rounded up."""
    columns, start = dict[str, Columns](), 0
    for name, parameter in parameters.items():
        inner = parameter.numel() // parameter.shape[0]
        stop = start + -(-parameter.shape[0] // size) * inner
        columns[name] = Columns(start, stop, inner)
        start = stop
    return columns
