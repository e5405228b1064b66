"""Newton–Schulz: the nearest orthogonal matrix, by products alone."""

from __future__ import annotations

import math

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan et al. 2024: the steepest slope at zero
SMALLEST = 1e-7  # norm below which a matrix is not scaled up


def orthogonalised(matrix: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """Return U V^T of the singular value decomposition U S V^T, roughly (Jordan et al. 2024, Muon).

    Singular values of the result lie between about 0.7 and 1.2. It repeats the arithmetic of
    torch.optim.Muon, in the same order.

    Args:
        matrix: float32 [rows, columns].
        steps: iterations of the quintic polynomial.
        dtype: of the products.

    Returns:
        `dtype` [rows, columns].
    """
    a, b, c = COEFFICIENTS
    x = matrix.to(dtype, copy=True)
    tall = len(x) > x.shape[1]
    x = x.T if tall else x
    x.div_(x.norm().clamp(min=SMALLEST))  # no singular value is then above 1
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def rms_factor(rows: int, columns: int) -> float:
    """Return the factor that gives an orthogonal matrix the size of AdamW's directions.

    Their root mean square is about 0.2 (Liu et al. 2025, section 2.2), so both kinds of parameter
    train at one learning rate.
    """
    return 0.2 * math.sqrt(max(rows, columns))
