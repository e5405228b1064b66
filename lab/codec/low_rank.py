"""Products of a matrix with two factors of low rank, fused with error feedback.

BLAS is made for matrices of many columns: with factors of one to four, its products take several
times as long as memory needs. (Vogels et al., PowerSGD, NeurIPS 2019, Algorithm 1.)
"""

from __future__ import annotations

import ctypes
import math
import zlib
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from lab.codec.kernels import bound, library

HIGHEST_RANK = 4  # of the fast kernels


class Kernels(Protocol):
    """Functions on contiguous tensors of one kind of device."""

    def project(self, gradient: Tensor, residual: Tensor | None, q: Tensor, p: Tensor) -> None:
        """Add the gradient to the residual, and multiply the sum M by Q: P = MQ.

        Args:
            gradient: float32 [rows, columns].
            residual: like `gradient`, becomes M. None: no error feedback, M is the gradient.
            q: float32 [rank, columns], Q^T.
            p: float32 [rows, rank], receives P.
        """
        ...

    def project_back(self, matrix: Tensor, p: Tensor, q: Tensor, subtract: bool) -> None:
        """Multiply Q = M^T P, and subtract P Q^T from M.

        Args:
            matrix: float32 [rows, columns], M.
            p: float32 [rows, rank].
            q: float32 [rank, columns], receives Q^T.
            subtract: False leaves M as it is.
        """
        ...

    def rebuild(self, p: Tensor, q: Tensor, out: Tensor) -> None:
        """Multiply P Q^T into `out`, float32 [rows, columns]; all ranks get the same bits."""
        ...


def kernels(device: torch.device, rank: int) -> Kernels:
    """Return the fastest kernels for tensors of `device`, and factors of `rank` columns."""
    fits = device.type == "cpu" and rank <= HIGHEST_RANK
    found = library("low_rank") if fits else None
    return Reference() if found is None else Native(found)


class Native:
    """The kernels in C++ (cpp/low_rank.cpp)."""

    def __init__(self, found: ctypes.CDLL) -> None:
        self._project = bound(found, "low_rank_project", tensors=4, numbers=4)
        self._project_back = bound(found, "low_rank_project_back", tensors=3, numbers=5)
        self._rebuild = bound(found, "low_rank_rebuild", tensors=3, numbers=4)

    def project(self, gradient: Tensor, residual: Tensor | None, q: Tensor, p: Tensor) -> None:
        kept = None if residual is None else residual.data_ptr()
        self._project(
            *(gradient.data_ptr(), kept, q.data_ptr(), p.data_ptr()),
            *(*gradient.shape, q.shape[0], torch.get_num_threads()),
        )

    def project_back(self, matrix: Tensor, p: Tensor, q: Tensor, subtract: bool) -> None:
        self._project_back(
            *(matrix.data_ptr(), p.data_ptr(), q.data_ptr(), *matrix.shape),
            *(q.shape[0], subtract, torch.get_num_threads()),
        )

    def rebuild(self, p: Tensor, q: Tensor, out: Tensor) -> None:
        self._rebuild(
            *(p.data_ptr(), q.data_ptr(), out.data_ptr(), *out.shape),
            *(q.shape[0], torch.get_num_threads()),
        )


class Reference:
    """The definition, in plain torch."""

    def project(self, gradient: Tensor, residual: Tensor | None, q: Tensor, p: Tensor) -> None:
        torch.mm(gradient if residual is None else residual.add_(gradient), q.T, out=p)

    def project_back(self, matrix: Tensor, p: Tensor, q: Tensor, subtract: bool) -> None:
        torch.mm(p.T, matrix, out=q)
        if subtract:
            matrix.addmm_(p, q, alpha=-1)

    def rebuild(self, p: Tensor, q: Tensor, out: Tensor) -> None:
        torch.mm(p, q, out=out)


def random_factor(name: str, rank: int, columns: int, device: torch.device) -> Tensor:
    """Return parameter `name`'s first Q^T: random, float32 [rank, columns], equal on all ranks."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(rank, columns, generator=generator).to(device)


def orthonormal(p: Tensor) -> Tensor:
    """Return an orthonormal basis of the columns of `p`, float32 [rows, rank].

    It comes from QR, not Gram-Schmidt, which fails on a matrix of lower rank.
    """
    return torch.linalg.qr(p).Q.contiguous()


def together(shapes: Sequence[Sequence[int]], like: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return a vector to send, and tensors of `shapes` that share its memory in order."""
    sizes = [math.prod(shape) for shape in shapes]
    message = like.new_empty(sum(sizes))
    parts = message.split(sizes)
    return message, [part.view(*shape) for part, shape in zip(parts, shapes, strict=True)]
