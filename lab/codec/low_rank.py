"""Products of a matrix with two factors of low rank, fused with error feedback.

BLAS is made for matrices of many columns: with factors of one to four, its products take several
times as long as memory needs. (Vogels et al., PowerSGD, NeurIPS 2019, Algorithm 1.)
"""

from __future__ import annotations

import ctypes
import math
import zlib
from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from lab.codec.kernels import bound, library

HIGHEST_RANK = 4  # of the fast kernels


class Factors:
    """Where the matrices M of a bucket lie, and in two messages their factors P and Q^T.

    Args:
        matrices: of each the first value in the bucket, rows, columns, and the rank of its factors.

    Attributes:
        table: int64 [matrices, 6], these and the first values of P and of Q^T, for the kernels.
        num_p, num_q: values of the messages: P, [rows, rank], and Q^T, [rank, columns], of each.
    """

    def __init__(self, matrices: Sequence[tuple[int, int, int, int]]) -> None:
        self.matrices = matrices
        *ps, self.num_p = accumulate((rows * rank for _, rows, _, rank in matrices), initial=0)
        *qs, self.num_q = accumulate((rank * width for _, _, width, rank in matrices), initial=0)
        rows = [[*each, p, q] for each, p, q in zip(matrices, ps, qs, strict=True)]
        self.table = torch.tensor(rows, dtype=torch.int64)

    def of(self, flat: Tensor) -> list[Tensor]:
        """Return the matrices among values that are laid out like the bucket's."""
        flat = flat.view(-1)
        return [
            flat[start : start + rows * columns].view(rows, columns)
            for start, rows, columns, _ in self.matrices
        ]

    def ps(self, message: Tensor) -> list[Tensor]:
        """Return each P of a message."""
        parts = message.view(-1).split([rows * rank for _, rows, _, rank in self.matrices])
        return [part.view(-1, each[3]) for part, each in zip(parts, self.matrices, strict=True)]

    def qs(self, message: Tensor) -> list[Tensor]:
        """Return each Q^T of a message."""
        parts = message.view(-1).split([rank * columns for _, _, columns, rank in self.matrices])
        return [part.view(each[3], -1) for part, each in zip(parts, self.matrices, strict=True)]


class Reference:
    """The definition in plain torch, on contiguous float32 tensors, for all matrices of a bucket.

    Arguments: `factors` says where matrices lie in `gradients`, in `residuals` and in `out`, which
    are like the bucket; `p` and `q` are messages of all P and of all Q^T.
    """

    def project(
        self, factors: Factors, gradients: Tensor, residuals: Tensor | None, q: Tensor, p: Tensor
    ) -> None:
        """Add gradients to residuals, and multiply the sums M by Q: P = MQ goes into `p`.

        Residuals become M. None: no error feedback, M is the gradient.
        """
        sums = gradients if residuals is None else residuals
        if residuals is not None and factors.matrices:
            torch._foreach_add_(factors.of(residuals), factors.of(gradients))
        for matrix, q_t, out in zip(factors.of(sums), factors.qs(q), factors.ps(p), strict=True):
            torch.mm(matrix, q_t.T, out=out)

    def project_back(
        self, factors: Factors, matrices: Tensor, p: Tensor, q: Tensor, subtract: bool
    ) -> None:
        """Multiply Q = M^T P, of which Q^T goes into `q`, and subtract P Q^T from M if told so."""
        parts = factors.of(matrices), factors.ps(p), factors.qs(q)
        for matrix, left, q_t in zip(*parts, strict=True):
            torch.mm(left.T, matrix, out=q_t)
            if subtract:
                matrix.addmm_(left, q_t, alpha=-1)

    def rebuild(self, factors: Factors, p: Tensor, q: Tensor, out: Tensor) -> None:
        """Multiply P Q^T into `out`; all ranks get the same bits."""
        for each in zip(factors.ps(p), factors.qs(q), factors.of(out), strict=True):
            torch.mm(each[0], each[1], out=each[2])


class Native(Reference):
    """The same in C++ (cpp/low_rank.cpp)."""

    def __init__(self, found: ctypes.CDLL) -> None:
        self._project = bound(found, "low_rank_project", tensors=5, numbers=2)
        self._project_back = bound(found, "low_rank_project_back", tensors=4, numbers=3)
        self._rebuild = bound(found, "low_rank_rebuild", tensors=4, numbers=2)

    def project(
        self, factors: Factors, gradients: Tensor, residuals: Tensor | None, q: Tensor, p: Tensor
    ) -> None:
        kept = None if residuals is None else residuals.data_ptr()
        self._project(
            *(gradients.data_ptr(), kept, q.data_ptr(), p.data_ptr(), factors.table.data_ptr()),
            *(len(factors.matrices), torch.get_num_threads()),
        )

    def project_back(
        self, factors: Factors, matrices: Tensor, p: Tensor, q: Tensor, subtract: bool
    ) -> None:
        self._project_back(
            *(matrices.data_ptr(), p.data_ptr(), q.data_ptr(), factors.table.data_ptr()),
            *(len(factors.matrices), subtract, torch.get_num_threads()),
        )

    def rebuild(self, factors: Factors, p: Tensor, q: Tensor, out: Tensor) -> None:
        self._rebuild(
            *(p.data_ptr(), q.data_ptr(), out.data_ptr(), factors.table.data_ptr()),
            *(len(factors.matrices), torch.get_num_threads()),
        )


def kernels(device: torch.device, rank: int) -> Reference:
    """Return the fastest kernels for tensors of `device`, and factors of at most `rank` columns."""
    fits = device.type == "cpu" and rank <= HIGHEST_RANK
    found = library("low_rank") if fits else None
    return Reference() if found is None else Native(found)


def orthonormalise(ps: Iterable[Tensor]) -> None:
    """Replace each P, float32 [..., rows, rank], by an orthonormal basis of its columns.

    It comes from QR, not Gram-Schmidt, which fails on a matrix of lower rank.
    """
    for p in ps:
        p.copy_(torch.linalg.qr(p).Q)


def random_factor(name: str, rank: int, columns: int, device: torch.device) -> Tensor:
    """Return parameter `name`'s first Q^T: random, float32 [rank, columns], equal on all ranks."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(rank, columns, generator=generator).to(device)


def together(shapes: Sequence[Sequence[int]], like: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return a vector to send, and tensors of `shapes` that share its memory in order."""
    sizes = [math.prod(shape) for shape in shapes]
    message = like.new_empty(sum(sizes))
    parts = message.split(sizes)
    return message, [part.view(*shape) for part, shape in zip(parts, shapes, strict=True)]
