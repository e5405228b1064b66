"""No exchange and no schedule either: not even a bucket is filled."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from lab.distributed.comm import Comm
from lab.exchange.base import Exchange
from lab.exchange.none import NoExchange
from lab.sync.base import Sync


class NoSync(Sync):
    """What GradSync is to the trainer, without buckets and hooks: not even a copy is made.

    (`strategy=overlap exchange=none` has them, and shows what they cost.)

    Raises:
        ValueError: an exchange, which would be ignored.
    """

    keeps_replicas_equal = False

    def __init__(self, module: nn.Module, exchange: Exchange, comm: Comm, **_: Any) -> None:
        if not isinstance(exchange, NoExchange):
            name = type(exchange).__name__
            raise ValueError(f"exchange={name}: strategy=none has none; take strategy=allreduce")
        self.module, self.exchange, self.comm = module, exchange, comm
        self.step = 0

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """Forward and backward of one micro-batch."""
        return nullcontext()

    def finish(self) -> None:
        """Leave each rank its own gradient."""
        self.unscale()
        self.step += 1
