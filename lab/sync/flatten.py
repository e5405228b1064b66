"""Move parameters into one block of memory."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lab.exchange.layout import is_rows_first, travelling


def flatten(parameters: list[nn.Parameter], multiple: int = 1) -> Tensor:
    """Move `parameters` into one block of memory, each in the order in which its values travel.

    Args:
        parameters: real and of one dtype. One that is not row after row becomes row-major.
        multiple: divides the block's length; zeros fill it up.

    Returns:
        [number of values, rounded up].
    """
    rows = [travelling(p, p) for p in parameters]
    missing = -sum(map(len, rows)) % multiple
    flat = torch.cat([*rows, rows[0].new_zeros(missing)]) if len(rows) > 1 or missing else rows[0]
    parts = torch.split(flat[: len(flat) - missing], [len(row) for row in rows])
    for parameter, part in zip(parameters, parts, strict=True):
        rows_first = is_rows_first(parameter)
        parameter.data = (
            part.as_strided(parameter.shape, parameter.stride())
            if rows_first
            else part.view(parameter.shape)
        )
    return flat


def refuse_complex(strategy: str, parameters: dict[str, nn.Parameter]) -> None:
    """Refuse complex parameters, whose weights a sync would have to move as pairs.

    Raises:
        ValueError: names one.
    """
    for name, parameter in parameters.items():
        if parameter.is_complex():
            kind = str(parameter.dtype).removeprefix("torch.")
            raise ValueError(
                f"{name}: is {kind}; strategy={strategy} moves real weights; use one that averages "
                "gradients, such as allreduce"
            )
