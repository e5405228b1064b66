"""A frozen variance in the memory of 1/N of it: two factors on all ranks, the rest on its owner."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lab.exchange.layout import as_matrix

LARGEST = 10.0  # an owner enlarges no sum, and with it no error of signs, by more


@dataclass
class Frozen:
    """A parameter's variance at the moment of freezing, without the rows that had no gradient.

    With R and C the means of v over a row and over a column, the root of R C / mean(v) (Shazeer &
    Stern 2018, section 3) is close to the root of v. Every rank divides by it before it takes
    signs, since values that share one magnitude should be of one size. The owner of a row corrects
    the sum to the true root.

    Attributes:
        active: bool [rows], the rows whose variance is not zero.
        scales: float32 [active rows + columns], the factors of 1 / root.
        ratio: float32 [active values], the factored root over (root of v + eps).
    """

    active: Tensor
    scales: Tensor
    ratio: Tensor


def freeze(variance: Tensor, shape: torch.Size, eps: float) -> Frozen:
    """Freeze a variance, in its own memory unless rows are left out.

    The host waits to know which rows are active, once for a parameter.

    Args:
        variance: float32 [values], corrected for its bias; overwritten.
    """
    rows, columns = as_matrix(shape) or (variance.numel(), 1)
    v = variance.view(rows, columns)
    active = (v != 0).any(dim=1)
    if not active.all():
        v = v[active]
    of_row, of_column = _factors(v)
    true = v.sqrt_().add_(eps).mul_(of_row[:, None]).mul_(of_column)
    ratio = true.clamp_(min=1 / LARGEST).reciprocal_()
    return Frozen(active, torch.cat([of_row, of_column]), ratio.flatten())


def divide(values: Tensor, frozen: Frozen) -> None:
    """Divide all rows by the root of the variance, in place; rows without one are zeros.

    Args:
        values: float32 [rows, columns].
    """
    every = len(frozen.scales) == sum(values.shape)
    active = values if every else values[frozen.active]
    scaled(active, frozen.scales, 1.0, out=active)
    active.mul_(frozen.ratio.view_as(active))
    if not every:
        values[frozen.active] = active


def raise_least(v: Tensor) -> None:
    """Raise values of v far below their row's and column's, in place. The host never waits.

    What is divided by the root of v keeps errors of signs, of the size of the root then. So the
    root of a value without gradients must not be 0, nor fall to that of a first small gradient.

    Args:
        v: float32 [rows, columns]; rows without any gradient stay zeros.
    """
    of_row, of_column = _factors(v)
    least = torch.outer(1 / (LARGEST * of_row), 1 / of_column).square_()
    torch.maximum(v, least, out=v)


def _factors(v: Tensor) -> tuple[Tensor, Tensor]:
    """Return two factors of 1 / root of v's rank-1 estimate, [rows] and [columns]."""
    by_row, by_column = v.mean(dim=1), v.mean(dim=0)
    mean = by_row.mean()
    # A column without gradients gets the mean: nothing but the signs' own errors is divided by it.
    of_column = torch.where(by_column > 0, mean / by_column, 1.0).sqrt_()
    return by_row.rsqrt(), of_column


def scaled(values: Tensor, scales: Tensor, factor: float, out: Tensor) -> None:
    """Write `values` over the factored root of the variance, times `factor`, into `out`.

    Args:
        values, out: float32 [active rows, columns].
        scales: see Frozen.
    """
    of_row, of_column = scales.split(list(values.shape))
    torch.mul(values, (factor * of_row)[:, None], out=out)
    out.mul_(of_column)
