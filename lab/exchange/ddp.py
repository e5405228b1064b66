"""torch's DistributedDataParallel, untouched: the outside reference."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lab.distributed.comm import Comm
from lab.distributed.torch_comm import TorchComm
from lab.exchange.exchange import Exchange
from lab.exchange.outside import OutsideSync


class DDPSync(OutsideSync):
    """What GradSync is to the trainer, with DDP doing the work, which it ends inside backward.

    Raises:
        ValueError: settings that DDP as its users have it cannot follow.
    """

    module: DistributedDataParallel

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
        gradient_bytes = sum(p.nbytes for p in model.parameters() if p.requires_grad)
        super().__init__("ddp", module, exchange, comm, gradient_bytes)
        if not isinstance(comm, TorchComm):
            raise ValueError("strategy=ddp: runs over torch.distributed alone")
        self.module = DistributedDataParallel(
            module,
            bucket_cap_mb=bucket_mb,
            process_group=comm.group,  # type: ignore[arg-type]  # torch's stubs name another class
        )

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """Forward and backward of one micro-batch; only the last one's gradients are reduced."""
        return nullcontext() if last else self.module.no_sync()
