"""torch's DistributedDataParallel and its communication hooks, untouched: outside references."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    powerSGD_hook,
)
from torch.nn.parallel import DistributedDataParallel

from lab.distributed.comm import Comm
from lab.distributed.torch_comm import TorchComm
from lab.exchange.base import Exchange
from lab.sync.library import OutsideSync

HOOKS = ("none", "noop", "bf16", "fp16", "powersgd")


class DDPSync(OutsideSync):
    """What GradSync is to the trainer, with DDP doing the work, which it ends inside backward.

    Args:
        hook: torch's communication hook (torch.distributed.algorithms.ddp_comm_hooks). "noop" moves
            nothing, for timing alone: replicas drift apart. "powersgd" is its PowerSGD of rank 1
            after two exact steps; its errors are DDP's own, and not in checkpoints.

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
        hook: str = "none",
        **_: Any,
    ) -> None:
        if hook not in HOOKS:
            raise ValueError(f"sync.hook={hook}: allowed are {', '.join(HOOKS)}")
        if not overlap or not bucket_mb:
            raise ValueError(
                f"overlap={overlap} bucket_mb={bucket_mb}: strategy=ddp always overlaps, "
                "with buckets above 0 MB"
            )
        gradient_bytes = sum(p.nbytes for p in model.parameters() if p.requires_grad)
        super().__init__("ddp", module, exchange, comm, gradient_bytes)
        if not isinstance(comm, TorchComm):
            raise ValueError("strategy=ddp: runs over torch.distributed alone")
        if hook == "bf16" and comm.backend != "nccl":
            raise ValueError("sync.hook=bf16: torch has it over NCCL alone; use sync.hook=fp16")
        self.module = DistributedDataParallel(
            module,
            bucket_cap_mb=bucket_mb,
            process_group=comm.group,  # type: ignore[arg-type]  # torch's stubs name another class
        )
        self._power: powerSGD_hook.PowerSGDState | None = None
        self._sent = 0  # values, by PowerSGD since it began
        self._register(hook, comm.group)

    def _register(self, hook: str, group: ProcessGroup) -> None:
        self.keeps_replicas_equal = hook != "noop"
        self.needs_like_gpus = hook == "powersgd"  # orthogonalises on every rank
        if hook == "noop":
            self._wire_bytes = 0
            self.module.register_comm_hook(None, debugging_hooks.noop_hook)
        elif hook in ("bf16", "fp16"):
            self._wire_bytes //= 2
            cast = getattr(default_hooks, f"{hook}_compress_hook")
            self.module.register_comm_hook(group, cast)
        elif hook == "powersgd":
            self._power = powerSGD_hook.PowerSGDState(group, start_powerSGD_iter=2)
            self.module.register_comm_hook(self._power, powerSGD_hook.powerSGD_hook)

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """Forward and backward of one micro-batch; only the last one's gradients are reduced."""
        return nullcontext() if last else self.module.no_sync()

    def finish(self) -> None:
        """Book what DDP sent; backward has exchanged the gradients."""
        if self._power is not None:
            sent = int(self._power.compression_stats()[2])
            if sent:  # the first steps are exact, and not in its count
                self._wire_bytes = 4 * (sent - self._sent)
            self._sent = sent
        super().finish()
