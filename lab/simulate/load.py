"""Arguments of cost cards: a bucket on a network, and the sizes of a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lab.exchange.chunks import LAG, chunk_mb_over
from lab.exchange.grouping import MIB
from lab.model.profile import VALUE_BYTES
from lab.settings.names import class_name
from lab.simulate.network import Cost, Network

# Operations of matrix products in the time of a byte of codecs: assumed. A core computes ten; the
# tensor cores of an H100 two hundred at half of their peak.
OPERATIONS_PER_BYTE = {"gloo": 10.0, "nccl": 200.0}

Settings = Mapping[str, Any]
Shape = tuple[int, ...]
FSDP = {"_target_": "torch.distributed.fsdp.FSDP"}  # its copies have a rate of their own


def class_of(exchange: Settings) -> str:
    """Return the class name of a configured exchange of the lab's; of a user's, its path."""
    return class_name(exchange["_target_"])


@dataclass(frozen=True)
class Stage:
    """Seconds in which a rank computes (row "codec") or its links are busy (row "exchange").

    Attributes:
        payload_bytes: bytes that the busiest rank sends.
        inside: only links inside nodes are busy, so that those between nodes may be as well.
        codec: whose rate it takes to compute, by the exchange's class name.
        across_bytes: bytes that a node's ranks together send to other nodes; NaN: not known.
    """

    row: str
    seconds: float
    payload_bytes: float = 0.0
    inside: bool = False
    codec: str = ""
    across_bytes: float = 0.0

    def scaled(self, share: float) -> Stage:
        """Return a share of the stage, as of one step or one leg."""
        return replace(
            self,
            seconds=self.seconds * share,
            payload_bytes=self.payload_bytes * share,
            across_bytes=self.across_bytes * share,
        )


@dataclass
class Load:
    """One bucket and the exchange that averages it; collects the stages.

    Attributes:
        shapes: shapes of the bucket's parameters.
        exchange: `_target_` and its arguments, as configured.
        network: the ranks and their links.
    """

    shapes: Sequence[Shape]
    exchange: Settings
    network: Network
    stages: list[Stage] = field(default_factory=list)

    @property
    def n(self) -> int:
        """Number of values in the bucket."""
        return sum(map(math.prod, self.shapes))

    @property
    def N(self) -> int:
        """Number of ranks."""
        return self.network.size

    @property
    def num_bytes(self) -> int:
        """Bytes of the uncompressed gradient."""
        return VALUE_BYTES * self.n

    @property
    def chunk_bytes(self) -> float:
        """Bytes of the largest chunk; infinite if the exchange sends whole buckets."""
        chunk_mb = chunk_mb_over(self.exchange["chunk_mb"], self.network.hardware.library)
        return chunk_mb * MIB if chunk_mb else math.inf

    def codec(self, num_bytes: float, calls: int = 1, in_torch: float | None = None) -> None:
        """Add a stage that reads and writes `num_bytes` of memory in `calls` calls.

        Args:
            in_torch: bytes of a codec that is plain torch on GPUs; None: the same.
        """
        hardware = self.network.hardware
        if in_torch is not None and hardware.library == "nccl":
            num_bytes = in_torch
        name = class_of(self.exchange)
        seconds = calls * hardware.codec_s + num_bytes / hardware.codec_rate(name)
        factor = hardware.host_factor(self.N) * self.network.slowest_factor
        self.stages.append(Stage("codec", factor * seconds, codec=name))

    def products(self, operations: Sequence[float]) -> None:
        """Add a stage of matrix products, of so many operations on each rank.

        The busiest rank counts; where ranks share cores, they also compute all products together.
        """
        hardware, name = self.network.hardware, class_of(self.exchange)
        dearest = max(max(operations), sum(operations) / (hardware.num_cores or self.N))
        rate = OPERATIONS_PER_BYTE[hardware.library] * hardware.codec_rate(name)
        seconds = self.network.slowest_factor * dearest / rate
        self.stages.append(Stage("codec", seconds, codec=name))

    def wire(self, cost: Cost, inside: bool = False) -> None:
        """Add a stage that waits for a collective, of all ranks or inside each node."""
        sent = cost.payload_bytes, inside
        self.stages.append(Stage("exchange", cost.seconds, *sent, across_bytes=cost.across_bytes))

    def exact(self, num_values: int) -> Cost:
        """Return the cost of values that travel uncompressed, in a separate all-reduce."""
        return self.network.all_reduce(VALUE_BYTES * num_values)


@dataclass(frozen=True)
class Relay:
    """Costs of an exchange whose ranks all decode the same message at last (exchange.base.Relayed).

    Attributes:
        sum: appends the stages until ranks have the message.
        message_bytes: of a Load's bucket.
        decode: appends the stages after them.
        kept: bytes of memory for a message, of so many values.
    """

    sum: Callable[[Load], None]
    message_bytes: Callable[[Load], float]
    decode: Callable[[Load], None]
    kept: Callable[[float], float]


@dataclass(frozen=True)
class Sizes:
    """Arguments of memory formulas: numbers of float32 values, and one rank among N.

    Attributes:
        n: values of the whole model.
        gathered: values of buckets of several parameters, whose gradients are copied into a buffer.
        largest: values of the largest bucket.
        backend: library over which ranks talk; chunk sizes depend on it.
        chosen: classes of a schedule, or names that exchange=auto has chosen; empty: all.
        local: ranks of each node.
    """

    n: int
    gathered: int
    largest: int
    rank: int
    N: int
    backend: str = "gloo"
    chosen: frozenset[str] = frozenset()
    local: int = 1

    def chunks(self, num_values: float, exchange: Settings, num_children: int = 1) -> float:
        """Count the bytes of the chunks that arrive from `num_children` ranks at the same time."""
        chunk_mb = chunk_mb_over(exchange["chunk_mb"], self.backend)
        limit = chunk_mb * MIB if chunk_mb else math.inf
        return LAG * num_children * min(VALUE_BYTES * num_values, limit)
