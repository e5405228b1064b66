"""PowerSGD: low-rank approximation of gradients by one step of power iteration.

And the products of matrices with two factors, fused with error feedback: BLAS is made for matrices
of many columns, and with factors of one to four takes several times as long as memory needs.
"""

from __future__ import annotations

import ctypes
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lab.codec.kernels import bound, library, tried
from lab.codec.layout import Factors, together
from lab.distributed.comm import Collective, Comm, Completed
from lab.exchange.base import RankOfSize, Shapes
from lab.exchange.bucket import GradBucket
from lab.exchange.compressed import Lossy
from lab.exchange.cost import Costs, Needs, Sizes
from lab.exchange.layout import low_rank_matrix
from lab.exchange.memory import Memory
from lab.settings import checks

HIGHEST_RANK = 4  # of the fast kernels


class PowerSGD(Lossy):
    """Rank-r approximation, error feedback and warm start (Vogels et al. 2019, Algorithms 1, 2).

    M = gradient + residual of one tensor, as a matrix [outputs, the rest]. P = MQ is summed over
    the ranks and orthogonalised; Q = M^T P is averaged; every rank delivers P Q^T and keeps M minus
    P times its own, unaveraged Q^T. Both sums are all-reduces, one for all matrices of a bucket, so
    the bytes of a rank, 8r(outputs + rest)(N-1)/N per matrix, do not grow with N. The second has
    connections of its own (Comm.beside), so that buckets may be at different stages.

    P is orthogonalised by QR, not Gram-Schmidt, which fails on a matrix of lower rank: a zero
    gradient would leave Q zero for good.

    Args:
        rank: r. Vectors, and tensors with r(rows + columns) >= rows * columns, travel exactly.
        error_feedback: see Memory.
    """

    needs_like_gpus = True  # each rank orthogonalises P and multiplies it by Q

    def __init__(self, rank: int = 2, error_feedback: bool = True) -> None:
        super().__init__(Memory(error_feedback))
        self.rank = checks.integer("exchange.rank", rank, 1)
        self.q: dict[str, Tensor] = {}  # Q^T [r, columns] by parameter, equal on all ranks

    def add_cost(self, costs: Costs) -> bool:
        """Count passes over matrices; their factors are small."""
        found = (low_rank_matrix(shape, self.rank) for shape in costs.shapes)
        low = [matrix for matrix in found if matrix]
        n = sum(rows * columns for rows, columns in low)
        costs.codec(12 * n)
        first = costs.exact(costs.n - n) + costs.exact(self.rank * sum(rows for rows, _ in low))
        costs.wire(first)
        costs.codec(12 * n)
        costs.wire(costs.exact(self.rank * sum(columns for _, columns in low)))
        costs.codec(4 * n)
        return True

    def memory_bytes(self, sizes: Sizes) -> Needs:
        return Needs(kept=4 * sizes.n * self.memory.keeps)

    def stages(self, bucket: GradBucket, comm: Comm) -> Iterator[Collective]:
        plan, second = self.planned(bucket, comm, _MatrixPlan), comm.dup("second stage")
        kernels, factors, flat = plan.kernels, plan.factors, bucket.flat
        exact = [flat[part] for part in plan.exact]
        if exact:
            torch._foreach_copy_(plan.exact_sums, exact)
            exchanged = comm.iall_reduce(plan.exact_message)
        else:
            exchanged = Completed()
        kernels.project(factors, flat, plan.bound.own, plan.warm, plan.p)
        summed = comm.iall_reduce(plan.p) if plan.names else Completed()
        yield exchanged
        if exact:
            plan.exact_message.div_(comm.size)
            torch._foreach_copy_(exact, plan.exact_sums)
        yield summed
        kernels.orthonormalise(factors, plan.p, plan.ps)
        sums = flat if plan.bound.own is None else plan.bound.own  # M = gradient + residual
        kernels.project_back(factors, sums, plan.p, plan.q, subtract=self.memory.keeps)
        yield second.iall_reduce(plan.q) if plan.names else Completed()
        torch.div(plan.q, comm.size, out=plan.warm)
        kernels.rebuild(factors, plan.p, plan.warm, flat)

    def left_exact(self, shapes: Shapes, key: str = "exchange") -> Iterator[tuple[int, str]]:
        which = f"vectors, and matrices that are no larger than factors of {key}.rank={self.rank}"
        sizes = (
            shape.numel() for shape in shapes.values() if not low_rank_matrix(shape, self.rank)
        )
        yield sum(sizes), which

    def is_current(self, plan: Any) -> bool:
        same = not plan.names or self.q.get(plan.names[0]) is plan.first_warm
        return same and super().is_current(plan)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"q": dict(self.q)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.q = {name: value.clone() for name, value in state["q"].items()}

    def redistribute(self, states: list[dict[str, Any]], rank: int, size: int) -> dict[str, Any]:
        """Share residuals as others do; every rank had the same Q."""
        return super().redistribute(states, rank, size) | {"q": dict(states[0]["q"])}


class _MatrixPlan:
    """A bucket's matrices, and messages for their factors and for all other values.

    Attributes:
        names: of the matrices, in the order of their factors.
        p, q: the messages of P and of Q^T. ps: all P of as many rows that follow each other.
        warm: Q^T of the last step, of which the exchange keeps each by name.
        exact: places of values that travel as they are. exact_sums: views of their message.
    """

    def __init__(self, exchange: PowerSGD, bucket: GradBucket, comm: RankOfSize) -> None:
        flat, rank = bucket.flat, exchange.rank
        found = {
            name: (start, *matrix, rank)
            for name, start, _ in bucket.spans()
            if (matrix := low_rank_matrix(bucket.shapes[name], rank))
        }
        spans = [slice(start, start + rows * columns) for start, rows, columns, _ in found.values()]
        self.bound = exchange.memory.bind(bucket, [(span.start, span.stop) for span in spans])
        # Those of as many rows follow each other, so that they are orthogonalised together.
        found = dict(sorted(found.items(), key=lambda each: each[1][1]))
        self.kernels, self.names = factor_kernels(flat.device, rank), list(found)
        self.factors = factors = Factors(list(found.values()))
        self.p, self.q = flat.new_empty(factors.num_p), flat.new_empty(factors.num_q)
        self.warm = torch.empty_like(self.q)
        rows = Counter(rows for _, rows, _, _ in found.values())
        parts = self.p.split([each * count * rank for each, count in rows.items()])
        self.ps = [part.view(-1, each, rank) for part, each in zip(parts, rows, strict=True)]
        for name, warm in zip(found, factors.qs(self.warm), strict=True):
            before = exchange.q.get(name)  # the last step's; at first the same on all ranks
            first = random_factor(name, rank, warm.shape[1], flat.device)
            exchange.q[name] = warm.copy_(first if before is None else before)
        self.first_warm = exchange.q[self.names[0]] if found else None
        self.exact = _gaps(spans, len(flat))
        sizes = [(part.stop - part.start,) for part in self.exact]
        self.exact_message, self.exact_sums = together(sizes, flat)


def _gaps(covered: Iterable[slice], num_values: int) -> list[slice]:
    """Return the slices of `num_values` values between the ordered slices `covered`."""
    between, start = [], 0
    for part in covered:
        if start < part.start:
            between.append(slice(start, part.start))
        start = part.stop
    return [*between, slice(start, num_values)] if start < num_values else between


class LowRankReference:
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

    def orthonormalise(self, factors: Factors, p: Tensor, ps: Sequence[Tensor]) -> None:
        """Replace each P by an orthonormal basis of its columns.

        Args:
            ps: all P of a number of rows, [matrices, rows, rank], views of `p`.
        """
        orthonormalise(ps)

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


class NativeLowRank(LowRankReference):
    """The same in C++ (lab/codec/cpp/low_rank.cpp)."""

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


def factor_kernels(device: torch.device, rank: int) -> LowRankReference:
    """Return the fastest kernels for tensors of `device`, and factors of at most `rank` columns."""
    fits = rank <= HIGHEST_RANK
    if device.type == "cuda" and fits:
        return tried("lab.codec.gpu_low_rank", device, _trial) or LowRankReference()
    found = library("low_rank") if device.type == "cpu" and fits else None
    return LowRankReference() if found is None else NativeLowRank(found)


def _trial(kernels: LowRankReference, device: torch.device) -> None:
    factors, matrix = Factors([(0, 8, 8, 1)]), torch.ones(64, device=device)
    p, q = torch.ones(2, 8, device=device)
    kernels.project(factors, matrix, matrix.clone(), q, p)
    kernels.orthonormalise(factors, p, [])
    kernels.project_back(factors, matrix, p, q, True)
    kernels.rebuild(factors, p, q, matrix)


def orthonormalise(ps: Iterable[Tensor]) -> None:
    """Replace each P, float32 [..., rows, rank], by an orthonormal basis of its columns, by QR."""
    for p in ps:
        p.copy_(torch.linalg.qr(p).Q)


def random_factor(name: str, rank: int, columns: int, device: torch.device) -> Tensor:
    """Return parameter `name`'s first Q^T: random, float32 [rank, columns], equal on all ranks."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(rank, columns, generator=generator).to(device)
