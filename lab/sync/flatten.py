"""Move parameters into one block of memory."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def flatten(parameters: list[nn.Parameter], multiple: int = 1) -> Tensor:
    """Move `parameters` into one block of memory, each in its layout.

    Args:
        multiple: divides the block's length; zeros fill it up.

    Returns:
        [number of values, rounded up].
    """
    rows = [p.detach().as_strided((p.numel(),), (1,)) for p in parameters]
    missing = -sum(map(len, rows)) % multiple
    if len(rows) == 1 and not missing:
        return rows[0]
    flat = torch.cat([*rows, rows[0].new_zeros(missing)])
    parts = torch.split(flat[: len(flat) - missing], [len(row) for row in rows])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.data = part.as_strided(parameter.shape, parameter.stride())
    return flat
