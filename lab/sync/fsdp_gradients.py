"""Gradients that FSDP2's modules scatter: of all their parameters, reached by a rank or not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lab.exchange.layout import named
from lab.sync.fsdp_units import groups_of, modules_of_fsdp, state_of


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
