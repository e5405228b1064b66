"""A parameter's values cut into blocks of one scale each, and the blocks sharded among ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lab.codec.onebit.message import Matrix


def blocks(name: str, num_values: int, block_size: int) -> list[Matrix]:
    """Cut values into rows of `block_size`, and the rest, if there is any, into a row of its own.

    So no value is left out, and nothing travels in another message.
    """
    rows, rest = divmod(num_values, block_size)
    whole = [Matrix(name, 0, rows, block_size)] if rows else []
    return [*whole, Matrix(name, rows * block_size, 1, rest)] if rest else whole


def shard_of(values: Tensor, parts: Sequence[Matrix], rank: int, size: int) -> Tensor:
    """Copy the values that `rank` of `size` ranks sums: float32 [values of its rows]."""
    rows = [part.view(values)[part.shard(rank, size)].flatten() for part in parts]
    return torch.cat([values[:0], *rows])


def views_of_shard(shard: Tensor, parts: Sequence[Matrix], rank: int, size: int) -> list[Tensor]:
    """Return the rows in a result of `shard_of`, [rows, columns] for each part, not copied."""
    heights = [part.shard(rank, size) for part in parts]
    sizes = [(s.stop - s.start) * part.columns for s, part in zip(heights, parts, strict=True)]
    cut = zip(shard.split(sizes), parts, strict=True)
    return [rows.view(-1, part.columns) for rows, part in cut]


def joined(shards: Sequence[Tensor], parts: Sequence[Matrix]) -> Tensor:
    """Return all values from the shards of all ranks, in rank order."""
    cut = [views_of_shard(s, parts, rank, len(shards)) for rank, s in enumerate(shards)]
    return torch.cat(
        [shards[0][:0], *(rows.flatten() for part in zip(*cut, strict=True) for rows in part)]
    )
