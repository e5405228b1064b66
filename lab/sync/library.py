"""What the outside references share: another library exchanges all gradients of the model."""

from __future__ import annotations

from torch import nn

from lab.distributed.comm import Comm
from lab.exchange.base import Exchange
from lab.exchange.none import NoExchange
from lab.sync.base import Sync


class OutsideSync(Sync):
    """The part of GradSync's face that does not depend on the library.

    Its payload is booked as the all-reduce of all gradients, like Comm's.

    Args:
        strategy: for messages.
        module: what runs forward.
        exchange: must be none.
        wire_bytes: of all gradients, as they travel.

    Raises:
        ValueError: an exchange of the lab's, which would be ignored.
    """

    keeps_replicas_equal = True

    def __init__(
        self, strategy: str, module: nn.Module, exchange: Exchange, comm: Comm, wire_bytes: int
    ) -> None:
        if not isinstance(exchange, NoExchange):
            raise ValueError(
                f"exchange={type(exchange).__name__}: strategy={strategy} has its own, leave "
                "exchange=none"
            )
        self.module = module
        self.exchange = exchange
        self.comm = comm
        self.step = 0
        self._wire_bytes = wire_bytes

    def finish(self) -> None:
        """Once the library is done: unscale, and book what it sent."""
        self.unscale()
        if self._wire_bytes:
            steps, size = 2 * (self.comm.size - 1), self.comm.size
            self.comm.traffic.payload_bytes += steps * self._wire_bytes // size
            self.comm.traffic.num_messages += steps
        self.step += 1
