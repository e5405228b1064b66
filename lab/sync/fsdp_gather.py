"""The lab's all-gather in torch's FSDP2, one object for each FSDP module."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn

from lab.distributed.comm import Comm
from lab.exchange.bucket import Plans
from lab.exchange.gather import gather_bytes
from lab.sync.fsdp_hook import UnitHook
from lab.sync.fsdp_units import modules_of_fsdp


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
