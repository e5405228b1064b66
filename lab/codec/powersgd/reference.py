"""The definition of PowerSGD's products in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def project(gradient: Tensor, residual: Tensor | None, q: Tensor, p: Tensor) -> None:
    """See lab.codec.powersgd.codec.project."""
    torch.mm(gradient if residual is None else residual.add_(gradient), q.T, out=p)


def project_back(matrix: Tensor, p: Tensor, q: Tensor, subtract: bool) -> None:
    """See lab.codec.powersgd.codec.project_back."""
    torch.mm(p.T, matrix, out=q)
    if subtract:
        matrix.addmm_(p, q, alpha=-1)


def rebuild(p: Tensor, q: Tensor, out: Tensor) -> None:
    """See lab.codec.powersgd.codec.rebuild."""
    torch.mm(p, q, out=out)
