"""Products of a matrix with two factors of low rank, fused with error feedback: PowerSGD's codec.

BLAS is made for matrices of many columns: with factors of one to four, its products take several
times as long as memory needs. (Vogels et al., PowerSGD, NeurIPS 2019, Algorithm 1.)
"""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from lab.codec.native import fitting
from lab.codec.powersgd import native, reference

HIGHEST_RANK = 4  # of the fast kernels


def project(gradient: Tensor, residual: Tensor | None, q: Tensor, p: Tensor) -> None:
    """Add the gradient to the residual, and multiply the sum M by Q: P = MQ.

    Args:
        gradient: float32 [rows, columns].
        residual: like `gradient`, becomes M. None: no error feedback, M is the gradient.
        q: float32 [rank, columns], Q^T.
        p: float32 [rows, rank], receives P.
    """
    _implementation(gradient, residual, q, p, rank=len(q)).project(gradient, residual, q, p)


def project_back(matrix: Tensor, p: Tensor, q: Tensor, subtract: bool) -> None:
    """Multiply Q = M^T P, and subtract P Q^T from M.

    Args:
        matrix: float32 [rows, columns], M.
        p: float32 [rows, rank].
        q: float32 [rank, columns], receives Q^T.
        subtract: False leaves M as it is.
    """
    _implementation(matrix, p, q, rank=len(q)).project_back(matrix, p, q, subtract)


def rebuild(p: Tensor, q: Tensor, out: Tensor) -> None:
    """Multiply P Q^T into `out`, float32 [rows, columns]; all ranks get the same bits."""
    _implementation(p, q, out, rank=len(q)).rebuild(p, q, out)


def _implementation(*tensors: Tensor | None, rank: int) -> native.Kernels | ModuleType:
    if rank > HIGHEST_RANK:
        return reference
    return fitting(native.kernels, *tensors) or reference
