"""Horovod's DistributedOptimizer, untouched: an outside reference."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from lab.distributed.comm import Collective, Comm
from lab.distributed.horovod_comm import HorovodComm, horovod
from lab.distributed.worker import Worker
from lab.exchange.base import Exchange
from lab.sync.library import OutsideSync

WIRE_BYTES = {"none": 4, "fp16": 2}  # of one gradient value


class HorovodSync(OutsideSync):
    """What GradSync is to the trainer, with Horovod doing the work.

    DistributedOptimizer all-reduces each gradient from a hook, fused by Horovod's own thread
    (HOROVOD_FUSION_THRESHOLD, HOROVOD_CYCLE_TIME), and waits for all of them in `synchronize`. It
    wraps an optimizer of its own that never steps: the lab's updates the weights.

    Args:
        accumulate: backward passes per optimizer step.
        compression: "none" or "fp16" (Horovod's Compression).

    Raises:
        ValueError: settings that Horovod as its users have it cannot follow.
    """

    def __init__(
        self,
        model: nn.Module,
        module: nn.Module,
        exchange: Exchange,
        comm: Comm,
        worker: Worker,
        *,
        accumulate: int,
        compression: str,
        overlap: bool,
        bucket_mb: float | None,
        **_: Any,
    ) -> None:
        if not overlap or bucket_mb is not None:
            raise ValueError(
                f"overlap={overlap} bucket_mb={bucket_mb}: strategy=horovod always overlaps, and "
                "fuses by HOROVOD_FUSION_THRESHOLD"
            )
        if not isinstance(comm, HorovodComm):
            raise ValueError("strategy=horovod: runs over comm=horovod alone")
        if not all(p.is_contiguous() for p in model.parameters()):
            raise ValueError("channels_last=True: strategy=horovod takes contiguous tensors alone")
        if compression not in WIRE_BYTES:
            allowed = ", ".join(WIRE_BYTES)
            raise ValueError(f"sync.compression={compression}: allowed are {allowed}")
        num_values = sum(p.numel() for p in model.parameters() if p.requires_grad)
        wire_bytes = WIRE_BYTES[compression] * num_values
        super().__init__("horovod", module, exchange, comm, wire_bytes)
        self._worker = worker
        hvd = horovod()
        self._optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.0),
            named_parameters=model.named_parameters(),
            compression=getattr(hvd.Compression, compression),
            backward_passes_per_step=accumulate,
        )

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """Forward and backward of one micro-batch. Horovod counts them by itself."""
        return nullcontext()

    def finish(self) -> None:
        """Wait for Horovod, where the watch can see it wait."""
        self._worker.submit("gradients, HorovodSync", self._synchronize)
        self._worker.wait()
        super().finish()

    def _synchronize(self) -> Iterator[Collective]:
        self._optimizer.synchronize()
        yield from ()  # it has waited itself
