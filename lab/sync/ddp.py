"""torch's DistributedDataParallel and its communication hooks, unchanged: outside references."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.distributed import ProcessGroup
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    powerSGD_hook,
)
from torch.nn.parallel import DistributedDataParallel

from lab.distributed.torch_comm import TorchComm
from lab.sync.base import SyncParts
from lab.sync.library import LibrarySync
from lab.sync.pattern import ddp

HOOKS = ("none", "noop", "bf16", "fp16", "powersgd")


class DDPSync(LibrarySync):
    """A sync in which DDP exchanges the gradients, and finishes inside backward.

    Args:
        hook: torch's communication hook (torch.distributed.algorithms.ddp_comm_hooks). "noop" moves
            nothing, for timing alone: replicas drift apart. "powersgd" is its PowerSGD of rank 1
            after two exact steps; its errors are DDP's own, and not in checkpoints.

    Raises:
        ValueError: settings that unmodified DDP does not support.
    """

    def __init__(self, parts: SyncParts, *, hook: str) -> None:
        if hook not in HOOKS:
            raise ValueError(f"sync.hook={hook}: allowed are {', '.join(HOOKS)}")
        if not parts.overlap or not parts.bucket_mb:
            raise ValueError(
                f"overlap={parts.overlap} bucket_mb={parts.bucket_mb}: strategy=ddp always "
                "overlaps, with buckets above 0 MiB"
            )
        gradient_bytes = sum(p.nbytes for p in parts.model.parameters() if p.requires_grad)
        super().__init__("ddp", parts, ddp(hook), gradient_bytes)
        if not isinstance(parts.comm, TorchComm):
            raise ValueError("strategy=ddp: runs over torch.distributed only")
        if hook == "bf16" and parts.comm.backend != "nccl":
            raise ValueError("sync.hook=bf16: torch has it over NCCL only; use sync.hook=fp16")
        self.wrapped = DistributedDataParallel(
            parts.module, bucket_cap_mb=parts.bucket_mb, process_group=parts.comm.group
        )
        self.module = self.wrapped
        self._power: powerSGD_hook.PowerSGDState | None = None
        self._sent = 0  # values, by PowerSGD since it began
        self._register(hook, parts.comm.group)

    def _register(self, hook: str, group: ProcessGroup) -> None:
        self.needs_like_gpus = hook == "powersgd"  # orthogonalises on every rank
        state, call = self._hook(hook, group)
        if call is not None:
            self.wrapped.register_comm_hook(state, call)  # pyright: ignore[reportUnknownMemberType]

    def _hook(self, hook: str, group: ProcessGroup) -> tuple[object, Callable[..., Any] | None]:
        """Return torch's hook of that name and its state; adapt the counted bytes."""
        if hook == "noop":
            self._wire_bytes = 0
            return None, debugging_hooks.noop_hook
        if hook in ("bf16", "fp16"):
            self._wire_bytes //= 2
            return group, getattr(default_hooks, f"{hook}_compress_hook")
        if hook == "powersgd":
            self._power = powerSGD_hook.PowerSGDState(group, start_powerSGD_iter=2)
            return self._power, powerSGD_hook.powerSGD_hook
        return None, None

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last else self.wrapped.no_sync()

    def finish(self) -> None:
        """Count what DDP sent; backward has exchanged the gradients."""
        if self._power is not None:
            sent = int(self._power.compression_stats()[2])
            if sent:  # the first steps are exact, and not in its count
                self._wire_bytes = 4 * (sent - self._sent)
            self._sent = sent
        super().finish()
