"""torch's DistributedDataParallel, untouched: the outside reference."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lab.distributed.comm import Comm, Traffic
from lab.distributed.torch_comm import TorchComm
from lab.exchange.exchange import Exchange
from lab.exchange.none import NoExchange


class DDPSync:
    """What GradSync is to the trainer, with DDP doing the work.

    Its payload is booked as the all-reduce of all gradients, like Comm's.

    Raises:
        ValueError: settings that DDP as its users have it cannot follow.
    """

    keeps_replicas_equal = True

    def __init__(
        self,
        model: nn.Module,
        module: nn.Module,
        exchange: Exchange,
        comm: Comm,
        *,
        overlap: bool,
        bucket_mb: float | None,
        **_: Any,
    ) -> None:
        if not overlap or not bucket_mb:
            raise ValueError(
                f"overlap={overlap} bucket_mb={bucket_mb}: strategy=ddp always overlaps, "
                "with buckets above 0 MB"
            )
        if not isinstance(exchange, NoExchange):
            name = type(exchange).__name__
            raise ValueError(f"exchange={name}: strategy=ddp has its own, leave exchange=none")
        if not isinstance(comm, TorchComm):
            raise ValueError("strategy=ddp: runs over torch.distributed alone")
        self.exchange = exchange
        self.step = 0
        self.loss_scale = 1.0
        self.comm = comm
        self.module = DistributedDataParallel(
            module,
            bucket_cap_mb=bucket_mb,
            process_group=comm.group,  # type: ignore[arg-type]
        )
        self._gradient_bytes = sum(p.nbytes for p in model.parameters() if p.requires_grad)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """Forward and backward of one micro-batch; only the last one's gradients are reduced."""
        return nullcontext() if last else self.module.no_sync()

    def finish(self) -> bool:
        """DDP waits inside backward; what is left is to unscale, and to book its payload."""
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        if self.loss_scale != 1.0:
            torch._foreach_div_(gradients, self.loss_scale)
        steps, size = 2 * (self.comm.size - 1), self.comm.size
        traffic: Traffic = self.comm.traffic
        traffic.payload_bytes += steps * self._gradient_bytes // size
        traffic.num_messages += steps
        self.step += 1
        return True
