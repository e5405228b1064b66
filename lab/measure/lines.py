"""A straight line through the times of several batches: a fixed part, and one for each sample."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]


def fixed_and_per_sample(batches: Sequence[int], times: Sequence[Values]) -> tuple[Values, Values]:
    """Fit time = fixed + per_sample · batch by least squares, both of at least 0.

    Errors are relative to the times: noise grows with a time, so in absolute terms the largest
    batch would decide alone, and the fixed part is what the smallest ones show. Through two batches
    the line passes exactly, unless a part would be below 0; the other then fits alone.

    Args:
        batches: at least two, all different.
        times: for each batch an array of any shape, the same for all.

    Returns:
        fixed, per_sample: of that shape, in the unit of the times; 0 where a time is.
    """
    t = np.stack([np.asarray(each, dtype=np.float64) for each in times], axis=-1)
    b = np.array(batches, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        s, sb, sbb = ((b**power / t**2).sum(axis=-1) for power in (0, 1, 2))
        st, sbt = (1 / t).sum(axis=-1), (b / t).sum(axis=-1)
        determinant = s * sbb - sb**2
        fixed = (sbb * st - sb * sbt) / determinant
        per_sample = (s * sbt - sb * st) / determinant
        growing, constant = fixed < 0, per_sample < 0
        fixed = np.where(growing, 0.0, np.where(constant, st / s, fixed))
        per_sample = np.where(constant, 0.0, np.where(growing, sbt / sbb, per_sample))
    return np.nan_to_num(fixed), np.nan_to_num(per_sample)
