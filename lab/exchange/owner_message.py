"""A bucket as one line for each owner: packed, sent, and unpacked."""

from __future__ import annotations

from torch import Tensor, nn

from lab.exchange.owners import Place


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
