"""Syncs of other libraries; Horovod's DistributedOptimizer, unchanged, is an outside reference."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from lab.distributed.comm import Collective
from lab.distributed.horovod_comm import HorovodComm, horovod
from lab.exchange.allreduce import NoExchange, rounding_bound
from lab.exchange.layout import trainable
from lab.settings import checks
from lab.sync import pattern
from lab.sync.base import Reached, Sync, SyncParts
from lab.sync.pattern import Pattern

WIRE_BYTES = {"none": 4, "fp16": 2}  # of one gradient value


class LibrarySync(Sync):
    """A sync that leaves the exchange to another library.

    Its payload is counted as one all-reduce of all gradients, as Comm counts it.

    Args:
        strategy: name to show in messages. wire_bytes: bytes of all gradients on the wire.

    Raises:
        ValueError: one of the lab's exchanges is set, which the pattern says would be ignored.
    """

    def __init__(self, strategy: str, parts: SyncParts, pattern: Pattern, wire_bytes: int) -> None:
        if pattern.by_library and not isinstance(parts.exchange, NoExchange):
            raise ValueError(
                f"exchange={type(parts.exchange).__name__}: strategy={strategy} has its own "
                "exchange; leave exchange=none"
            )
        super().__init__(parts, pattern)
        self._wire_bytes = wire_bytes

    @property
    def keeps_replicas_equal(self) -> bool:
        return bool(self.pattern.transfers)

    def finish(self) -> Tensor | None:
        """Unscale, and count what the library sent. Call it when the library is done."""
        self._unscale()
        if self._wire_bytes:
            self.comm.count_all_reduce(self._wire_bytes)
        self.step += 1
        return None


def library_bound(compression: str, largest: float, size: int) -> float:
    """Bound the error of a library's mean of gradients; see Exchange.error_bound.

    Args:
        compression: "none", "bf16" or "fp16"; others state no bound.
    """
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(compression)
    if dtype is None:
        return 0.0 if compression == "none" else math.inf
    return rounding_bound(dtype, largest, size)


class HorovodSync(LibrarySync):
    """A sync in which Horovod exchanges the gradients.

    DistributedOptimizer all-reduces each gradient from a hook, fused by Horovod's own thread
    (HOROVOD_FUSION_THRESHOLD, HOROVOD_CYCLE_TIME), and waits for all of them in `synchronize`. It
    wraps an optimizer of its own that never steps: the lab's updates the weights. Horovod makes
    zeros where backward reached a parameter on no rank; they are taken away again.

    Raises:
        ValueError: settings that unmodified Horovod does not support.
    """

    def __init__(self, parts: SyncParts, *, compression: str) -> None:
        if not parts.overlap or parts.bucket_mb is not None:
            raise ValueError(
                f"overlap={parts.overlap} bucket_mb={parts.bucket_mb}: strategy=horovod needs "
                "overlap=true and bucket_mb=null; HOROVOD_FUSION_THRESHOLD sets its buckets"
            )
        if not isinstance(parts.comm, HorovodComm):
            raise ValueError("strategy=horovod: runs only over comm=horovod")
        for name, parameter in parts.model.named_parameters():
            if not parameter.is_contiguous():
                raise ValueError(
                    f"{name} has strides {list(parameter.stride())}, as "
                    "channels_last=true sets them; strategy=horovod accepts only contiguous tensors"
                )
        checks.one_of("sync.compression", compression, tuple(WIRE_BYTES))
        self._parameters = trainable(parts.model)
        num_values = sum(p.numel() for p in self._parameters.values())
        super().__init__("horovod", parts, pattern.horovod(), WIRE_BYTES[compression] * num_values)
        self._worker = parts.worker
        device = next(iter(self._parameters.values())).device
        self._reached = Reached(self._parameters, self.exchange, device)
        self._compression = compression
        hvd = horovod()
        self._optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(parts.model.parameters(), lr=0.0),
            named_parameters=parts.model.named_parameters(),
            compression=getattr(hvd.Compression, compression),
            backward_passes_per_step=parts.accumulate,
        )

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext()  # Horovod counts them by itself

    def error_bound(self, largest: float, size: int) -> float:
        return library_bound(self._compression, largest, size)

    def finish(self) -> None:
        """Wait for Horovod on the worker, where the watchdog can see it wait."""
        self._reached.lacks([n for n, p in self._parameters.items() if p.grad is None])

        def synchronize() -> Iterator[Collective]:
            self._optimizer.synchronize()
            yield from ()  # it has waited

        self._worker.submit("gradients, HorovodSync", synchronize)
        self._reached.begin(self.comm, self._worker)
        self._worker.wait()
        for name in self._reached.nowhere():
            self._parameters[name].grad = None
        super().finish()
