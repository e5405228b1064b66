"""NoSync: neither buckets nor exchanges, to time the ceiling."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from lab.exchange.allreduce import NoExchange
from lab.sync.base import Sync, SyncParts
from lab.sync.pattern import none


class NoSync(Sync):
    """A sync that leaves each rank its own gradients, without copying them into buckets.

    (`strategy=overlap exchange=none` has buckets and hooks, and shows what they cost.)

    Raises:
        ValueError: an exchange is set, which would be ignored.
    """

    def __init__(self, parts: SyncParts) -> None:
        if not isinstance(parts.exchange, NoExchange):
            name = type(parts.exchange).__name__
            raise ValueError(f"exchange={name}: strategy=none has none; use strategy=allreduce")
        super().__init__(parts, none())

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def finish(self) -> None:
        """Leave each rank its own gradients."""
        self._unscale()
        self.step += 1
