"""Rails: rail l joins the l-th ranks of all nodes, and carries a share of each parameter."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lab.distributed.comm import Comm
from lab.distributed.launcher import Nodes
from lab.exchange.base import Shapes
from lab.exchange.bucket import GradBucket, Plans


@dataclass(frozen=True)
class Place:
    """One rank's place on a rail, or on none.

    Attributes:
        rail: which rail; None: its node has more ranks than the smallest, and this is one of them.
        rank: number among the ranks of the rail.
        size: how many these are: one on each node.
    """

    rail: int | None
    rank: int
    size: int


@dataclass(frozen=True)
class Levels:
    """The two levels of a comm, as one of its ranks sees them.

    Attributes:
        nodes: the comm's.
        place: this rank's.
        inside: the ranks of this node; None: every node has a single one.
        across: the ranks of this rail; None: there is one node, or this rank is on no rail.
    """

    nodes: Nodes
    place: Place
    inside: Comm | None
    across: Comm | None

    @property
    def num_ranks(self) -> int:
        """Number of ranks of all nodes."""
        return sum(map(len, self.nodes))

    @classmethod
    def of(cls, comm: Comm) -> Levels:
        """Split `comm`, unless it has one level alone. A collective call."""
        nodes, place = comm.nodes, place_of(comm.rank, comm.nodes)
        if not is_split(nodes):
            return cls(nodes, place, *((comm, None) if len(nodes) == 1 else (None, comm)))
        inside = comm.split(next(at for at, node in enumerate(nodes) if comm.rank in node))
        across = comm.split(num_rails(nodes) if place.rail is None else place.rail)
        return cls(nodes, place, inside, None if place.rail is None else across)


def is_split(nodes: Nodes) -> bool:
    """Return whether there are two levels: several nodes, one with several ranks."""
    return len(nodes) > 1 and max(map(len, nodes)) > 1


def num_rails(nodes: Nodes) -> int:
    """Return how many rails there are: as many as the smallest node has ranks."""
    return min(map(len, nodes))


def place_of(rank: int, nodes: Nodes) -> Place:
    """Return the place of a rank."""
    local = next(list(node).index(rank) for node in nodes if rank in node)
    if local >= num_rails(nodes):
        return Place(None, 0, len(nodes))
    return Place(local, sorted(node[local] for node in nodes).index(rank), len(nodes))


def part_shapes(shapes: Shapes, rail: int, rails: int) -> dict[str, torch.Size]:
    """Return the shape of each parameter's share, which may have no rows."""
    return {name: torch.Size(part_shape(shape, rail, rails)) for name, shape in shapes.items()}


def shares(flat: Tensor, shapes: Shapes, rail: int, rails: int) -> Iterator[Tensor]:
    """Yield each parameter's share in `flat`, which holds all parameters: views [values]."""
    start = 0
    for shape in shapes.values():
        rows, width = rows_of(shape)
        part = share(rows, rail, rails)
        yield flat[start + part.start * width : start + part.stop * width]
        start += rows * width


class Blocks:
    """A bucket as one block for each rank of a node: block l is the part of rail l.

    Blocks are as long as the longest part. Ranks beyond the rails get one that nobody uses, so that
    the library's collectives serve uneven nodes too. A single parameter whose rows the rails share
    evenly needs no copy.

    Args:
        local: ranks on this node.
        rails: how many of them are on a rail.

    Attributes:
        memory: float32 [local, values of the longest part].
        parts: for each rail the bucket of its part, in this memory.
    """

    def __init__(self, bucket: GradBucket, local: int, rails: int) -> None:
        self._flat, self._plans = bucket.flat, bucket.plans
        parts = [list(shares(bucket.flat, bucket.shapes, rail, rails)) for rail in range(rails)]
        longest = max(sum(map(len, part)) for part in parts)
        self._in_place = (
            local == rails and len(bucket.shapes) == 1 and local * longest == len(bucket.flat)
        )
        if self._in_place:
            self.memory = bucket.flat.view(local, longest)
        else:
            self.memory = bucket.plans.scratch("blocks", bucket.flat, local, longest)
        self.parts = [self._part(bucket, rail, rails) for rail in range(rails)]
        self._values = [values for part in parts for values in part]
        self._places = [
            place
            for part, block in zip(parts, self.memory, strict=False)
            for place in block[: sum(map(len, part))].split([len(values) for values in part])
        ]

    def _part(self, bucket: GradBucket, rail: int, rails: int) -> GradBucket:
        shapes = part_shapes(bucket.shapes, rail, rails)
        flat = self.memory[rail, : sum(shape.numel() for shape in shapes.values())]
        plans = bucket.plans.setdefault(("rail", rail, rails), Plans())
        return GradBucket(shapes, flat, bucket.step, bucket.divided, plans=plans)

    def arriving(self, inside: Comm) -> Tensor | None:
        """Return memory like the blocks for a reduce-scatter; None where it needs none: NCCL."""
        if inside.backend == "nccl":
            return None
        return self._plans.scratch("arriving", self._flat, *self.memory.shape)

    def fill(self) -> None:
        """Copy the bucket into the blocks."""
        if not self._in_place:
            torch._foreach_copy_(self._places, self._values)

    def empty(self) -> None:
        """Copy the blocks back into the bucket."""
        if not self._in_place:
            torch._foreach_copy_(self._values, self._places)


def rows_of(shape: Sequence[int]) -> tuple[int, int]:
    """Return a parameter's rows, and the values in each. A scalar is one row, a value a column."""
    return (shape[0], math.prod(shape[1:])) if shape else (1, 1)


def share(rows: int, rail: int, rails: int) -> slice:
    """Return those of `rows` rows that a rail carries, maybe none."""
    return slice(rail * rows // rails, (rail + 1) * rows // rails)


def part_shape(shape: Sequence[int], rail: int, rails: int) -> tuple[int, ...]:
    """Return the shape of the rows that a rail carries."""
    rows = share(rows_of(shape)[0], rail, rails)
    return (rows.stop - rows.start, *shape[1:])
