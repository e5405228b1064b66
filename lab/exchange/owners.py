"""Who owns what, where every matrix has one owner and other parameters are owned in equal parts.

Without torch: exchanges and their costs use the same plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor, nn

from lab.exchange.layout import Matrix, as_matrix


@dataclass(frozen=True)
class Place:
    """A parameter's values in the message of its owner, or in those of all ranks.

    Attributes:
        owner: rank that owns all of it; None: each rank owns an equal part.
        start: first value in the owner's line; in all lines if there is no owner.
        length: values in a line.
    """

    name: str
    owner: int | None
    start: int
    length: int


def balanced(costs: Mapping[str, float], size: int) -> dict[str, int]:
    """Assign each item to one of `size` ranks, the dearest first, to whoever has least so far.

    It is Graham's rule of 1969: the busiest rank has at most 4/3 of what the best plan gives it.
    """
    loads, owner = [0.0] * size, dict[str, int]()
    for name in sorted(costs, key=lambda name: (-costs[name], name)):
        owner[name] = loads.index(min(loads))
        loads[owner[name]] += costs[name]
    return owner


def lines(
    shapes: Mapping[str, Sequence[int]], owner: Mapping[str, int], size: int
) -> tuple[list[Place], int]:
    """Lay out a bucket as one line for each rank; return the places, and the length of a line."""
    filled, places = [0] * size, list[Place]()
    for name, shape in shapes.items():
        if name in owner:
            rank, length = owner[name], prod(shape)
            places.append(Place(name, rank, filled[rank], length))
            filled[rank] += length
    width = max(filled)
    for name, shape in shapes.items():
        if name not in owner:
            length = -(-prod(shape) // size)
            places.append(Place(name, None, width, length))
            width += length
    return places, width


def hidden_matrices(shapes: Mapping[str, Sequence[int]]) -> dict[str, Matrix]:
    """Return the parameters that may be matrices by their shapes alone, as [outputs, the rest].

    A single row or column is a vector. Of a model, lab.exchange.direction knows more.
    """
    found = {name: as_matrix(shape) for name, shape in shapes.items()}
    return {name: matrix for name, matrix in found.items() if matrix and 1 not in matrix}


def newton_schulz_operations(rows: int, columns: int, steps: int) -> int:
    """Count the operations that orthogonalise a matrix: 2 for a product and a sum."""
    short, long = sorted((rows, columns))
    return steps * (4 * short * short * long + 2 * short**3)


def pack(values: Tensor, place: Place, message: Tensor) -> None:
    """Copy a parameter's values to their places in `message`, float32 [ranks, length of a line]."""
    stop = place.start + place.length
    if place.owner is not None:
        message[place.owner, place.start : stop] = values
        return
    for rank, line in enumerate(message[:, place.start : stop]):
        line.copy_(part_of(values, rank, len(message)))


def part_of(values: Tensor, rank: int, size: int) -> Tensor:
    """Return the part of `values` that `rank` of `size` ranks owns; zeros fill the last ones up."""
    length = -(-len(values) // size)
    part = values[rank * length : (rank + 1) * length]
    return nn.functional.pad(part, (0, length - len(part)))


def unpack(message: Tensor, place: Place, values: Tensor) -> None:
    """Copy a parameter's values from their places in `message`."""
    stop = place.start + place.length
    if place.owner is not None:
        values.copy_(message[place.owner, place.start : stop])
    else:
        values.copy_(message[:, place.start : stop].reshape(-1)[: len(values)])
