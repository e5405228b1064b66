"""LibrarySync: another library exchanges all gradients of the model."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lab.exchange.allreduce import NoExchange, rounding_bound
from lab.sync.base import Sync, SyncParts
from lab.sync.pattern import Pattern


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
                f"exchange={type(parts.exchange).__name__}: strategy={strategy} has its own, leave "
                "exchange=none"
            )
        super().__init__(parts, pattern)
        self._wire_bytes = wire_bytes

    @property
    def keeps_replicas_equal(self) -> bool:
        return bool(self.pattern.legs)

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
    if compression == "none":
        return 0.0
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(compression)
    return rounding_bound(dtype, largest, size) if dtype else math.inf
