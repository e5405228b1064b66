"""The lab's reduce-scatters in torch's FSDP2, one object for each FSDP module."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lab.distributed.comm import Traffic
from lab.distributed.torch_comm import TorchComm
from lab.exchange.base import Exchange
from lab.exchange.scatter import Columns, Layout, Scatter, scatter_of


class UnitReduceScatter:
    """A ReduceScatter (torch.distributed.fsdp, set_custom_reduce_scatter) of one FSDP module.

    It runs in FSDP's own group and stream, as FSDP's does. What it sums is float32; other types are
    converted before and after. Under `op` AVG, which FSDP asks for unless told otherwise, the sum
    is divided by the number of ranks.

    Args:
        names: of the module's parameters, in its order, as the whole model names them.
        parameters: these, sharded.
        traffic: counts what it sends.
    """

    def __init__(
        self,
        scatter: Scatter,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        traffic: Traffic,
    ) -> None:
        self._scatter, self._traffic = scatter, traffic
        self._names, self._parameters = names, parameters
        self._comm: TorchComm | None = None
        self._layout = Layout({})

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return memory for the gradients, or for their sum."""
        return torch.empty(*size, dtype=dtype, device=device)

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
            self._layout = Layout(_columns(self._names, self._parameters, group.size()))
        size = self._comm.size
        output = output_tensor.float()  # itself, if it is
        self._scatter.sum(output, input_tensor.float().view(size, -1), self._comm, self._layout)
        if op == dist.ReduceOp.AVG:
            output.div_(size)
        if output is not output_tensor:
            output_tensor.copy_(output)


def set_reduce_scatter(model: nn.Module, exchange: Exchange, traffic: Traffic) -> None:
    """Give each FSDP module in `model` a reduce-scatter in the codec of `exchange`.

    Raises:
        ValueError: no module is one of FSDP2, or the exchange has no reduce-scatter.
    """
    scatter = scatter_of(exchange)
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not modules:
        raise ValueError(f"{type(model).__name__}: holds no module of FSDP2's fully_shard")
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    for module in modules:
        own = sharded_parameters(module)
        names = [name_of[id(parameter)] for parameter in own]
        module.set_custom_reduce_scatter(UnitReduceScatter(scatter, names, own, traffic))  # pyright: ignore[reportArgumentType]


def sharded_parameters(module: FSDPModule) -> list[nn.Parameter]:
    """List the parameters that a module gathers, in the order of its gradients."""
    groups = module._get_fsdp_state()._fsdp_param_groups  # pyright: ignore[reportPrivateUsage]
    return [each.sharded_param for group in groups for each in group.fsdp_params]


def _columns(
    names: Sequence[str], parameters: Sequence[nn.Parameter], size: int
) -> dict[str, Columns]:
    """Return where FSDP puts parameters: each divided by its first dimension, rounded up."""
    columns, start = dict[str, Columns](), 0
    for name, parameter in zip(names, parameters, strict=True):
        inner = parameter.numel() // parameter.shape[0] if parameter.numel() else 0
        stop = start + -(-parameter.shape[0] // size) * inner
        columns[name] = Columns(start, stop, inner)
        start = stop
    return columns
