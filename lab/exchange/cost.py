"""The cost of an exchange, as its class says it: stages for the simulator, and memory.

Nothing here imports torch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from lab.exchange.grouping import LAG, MIB, VALUE_BYTES, ChunkMB, chunk_mb_over

if TYPE_CHECKING:
    from lab.exchange.base import Exchange

Shape = tuple[int, ...]


class Costs(ABC):
    """One bucket on a network, which collects the stages of its exchange; see simulate.costs.Load.

    Attributes:
        shapes: of the bucket's parameters.
        network: costs of collectives; see simulate.network.Network.
    """

    shapes: Sequence[Shape]
    network: Any
    stages: list[Any]

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

    def exact(self, num_values: int) -> Any:
        """Return the cost of values that travel uncompressed, in a separate all-reduce."""
        return self.network.all_reduce(VALUE_BYTES * num_values)

    def chunk_bytes(self, chunk_mb: ChunkMB) -> float:
        """Return the bytes of the largest chunk; infinite if buckets are sent whole."""
        return chunk_bytes(chunk_mb, self.network.hardware.library)

    @abstractmethod
    def codec(self, num_bytes: float, calls: int = 1) -> None:
        """Add a stage of `calls` calls that read and write `num_bytes` of memory."""

    @abstractmethod
    def products(self, operations: Sequence[float]) -> None:
        """Add a stage of matrix products, of so many operations on each rank."""

    @abstractmethod
    def wire(self, cost: Any, inside: bool = False) -> None:
        """Add a stage that waits for a collective, of all ranks or inside each node."""

    @abstractmethod
    def add(
        self,
        exchange: Exchange,
        shapes: Sequence[Shape] | None = None,
        network: Any = None,
        part: str = "whole",
        share: float = 1.0,
    ) -> float:
        """Add the stages of another exchange; return their seconds.

        Args:
            shapes, network: None: those of this bucket.
            part: see simulate.recorded.add_stages.
            share: of its stages, as of those of a run's steps in which it is used.
        """


def chunk_bytes(chunk_mb: ChunkMB, backend: str) -> float:
    """Return the bytes of the largest chunk over a library; infinite: there are no chunks."""
    size = chunk_mb_over(chunk_mb, backend)
    return size * MIB if size else math.inf


class Needs(NamedTuple):
    """Bytes of memory that a rank needs for an exchange, besides weights and gradients.

    Attributes:
        kept: residuals, buffers, and messages under way; NaN: not known.
        scratch: while it exchanges. Gradients that were gathered into a buffer leave free memory
            behind, which serves as scratch.
    """

    kept: float = 0.0
    scratch: float = 0.0


@dataclass(frozen=True)
class Sizes:
    """A model's numbers of float32 values, and one rank among N, whose memory is asked for.

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

    def chunks(self, num_values: float, chunk_mb: ChunkMB, num_children: int = 1) -> float:
        """Count the bytes of the chunks that arrive from `num_children` ranks at the same time."""
        limit = chunk_bytes(chunk_mb, self.backend)
        return LAG * num_children * min(4 * num_values, limit)


def of_buckets(buckets: Sequence[Mapping[str, Shape]]) -> tuple[int, int]:
    """Return `gathered` and `largest` of `Sizes`, of buckets of parameters' shapes by name."""
    counts = [(len(bucket), sum(map(math.prod, bucket.values()))) for bucket in buckets]
    gathered = sum(size for number, size in counts if number > 1)
    return gathered, max((size for _, size in counts), default=0)
