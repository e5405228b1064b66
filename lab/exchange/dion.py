"""Dion: orthonormal updates of low rank, from momentum that is never sent whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lab.codec import low_rank
from lab.codec.low_rank import Factors, orthonormalise, random_factor, together
from lab.distributed.comm import Comm
from lab.exchange.bucket import GradBucket
from lab.exchange.cost import Costs, Needs, Sizes
from lab.exchange.direction import MatrixDirection, is_finite, zeros
from lab.exchange.layout import hidden_matrices, rank_of
from lab.exchange.memory import shares
from lab.exchange.muon import rms_factor
from lab.settings import checks

ROUNDING = 1e-6  # a column of R is nothing else, if its norm is this share of the largest one's


class Dion(MatrixDirection):
    """Dion (Ahn et al. 2025) for hidden matrices, Adam for all else; only factors are sent.

    Each rank keeps a share of the momentum of a matrix, [outputs, the rest]; the shares add up to
    the momentum M of the mean gradient. A step of power iteration approximates M by P R^T:

    1. A rank adds its gradient / N to its share. P = MQ is summed over the ranks, and
       orthonormalised.
    2. R = M^T P is summed. A rank takes (1 - momentum) P times its own R^T from its share: what the
       factors miss stays in the momentum, which is Dion's error feedback.
    3. Q, for the next step, is R with columns of length 1; the direction is P Q^T.

    Both sums are all-reduces, one for all matrices of a bucket; the first carries the gradients of
    vectors, embeddings and the output layer as well. A rank sends 8r(outputs + rest)(N-1)/N bytes
    for a matrix, r = rank_fraction of its shorter side. Ranks have the same bits, if their devices
    are alike: each orthonormalises P, and multiplies it by Q, by itself.

    Args:
        rank_fraction: r over the shorter side, rounded up. From 1/2 on, the factors of a square
            matrix are no smaller than its gradient.
        momentum: decay rate of the part of the momentum that factors hold.
        betas, eps: of Adam. adam, matrices: see MatrixDirection.
    """

    kinds = ("share", "q", "momentum", "variance")
    needs_like_gpus = True

    def __init__(
        self,
        rank_fraction: float = 0.25,
        momentum: float = 0.95,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam: Sequence[str] = (),
        matrices: Sequence[str] = (),
    ) -> None:
        super().__init__(adam, matrices, betas, eps)
        self.rank_fraction = checks.number(
            "exchange.rank_fraction", rank_fraction, above=0, at_most=1
        )
        self.momentum = checks.number("exchange.momentum", momentum, at_least=0, below=1)

    def add_cost(self, costs: Costs) -> bool:
        """Count the passes over momentum, gradients and directions, and the factors that are sent.

        Orthonormalising P is work of the device, and left out.
        """
        shapes = {str(number): shape for number, shape in enumerate(costs.shapes)}
        matrices = list(hidden_matrices(shapes).values())
        n = sum(rows * columns for rows, columns in matrices)
        ranks = [rank_of(*matrix, self.rank_fraction) for matrix in matrices]
        left = sum(r * rows for r, (rows, _) in zip(ranks, matrices, strict=True))
        right = sum(r * columns for r, (_, columns) in zip(ranks, matrices, strict=True))
        costs.codec(16 * n)
        costs.wire(costs.exact(costs.n - n + left))
        costs.codec(12 * n)
        costs.wire(costs.exact(right))
        costs.codec(4 * n + 32 * (costs.n - n))
        return True

    def memory_bytes(self, sizes: Sizes) -> Needs:
        """Count momentum, and Q and R of the longer side; P is of the shorter one, and left out."""
        return Needs(kept=4 * sizes.n * (1 + 2 * self.rank_fraction))

    def average(self, bucket: GradBucket, comm: Comm) -> None:
        self.begin(bucket, comm)
        hidden = self.plan(bucket.shapes).matrices
        values = {name: bucket.flat[start:stop] for name, start, stop in bucket.spans()}
        matrices = {name: v.view(hidden[name]) for name, v in values.items() if name in hidden}
        others = {name: v for name, v in values.items() if name not in hidden}
        ps = self._orthonormal_ps(matrices, others, comm)
        for name, r in self._sums_of_r(matrices, ps, comm).items():
            self._direct(name, ps[name], r, matrices[name])
        for name, gradient in others.items():
            self.direct_by_adam(name, gradient)
        bucket.finite = is_finite(bucket.flat)

    def _orthonormal_ps(
        self, matrices: dict[str, Tensor], others: dict[str, Tensor], comm: Comm
    ) -> dict[str, Tensor]:
        """Add gradients to momentum; return each P, [rows, r], and average the other gradients."""
        qs = self.moments["q"]
        for name, gradient in matrices.items():
            if name not in qs:
                rank = rank_of(len(gradient), gradient.shape[1], self.rank_fraction)
                qs[name] = random_factor(name, rank, gradient.shape[1], gradient.device)
        factors = [(len(gradient), len(qs[name])) for name, gradient in matrices.items()]
        like = next(iter({**matrices, **others}.values()))
        message, parts = together([*(v.shape for v in others.values()), *factors], like)
        means, ps = parts[: len(others)], dict(zip(matrices, parts[len(others) :], strict=True))
        if means:
            torch._foreach_copy_(means, list(others.values()))
        for name, gradient in matrices.items():
            share = zeros(self.moments["share"], name, gradient)
            of = low_rank.kernels(gradient.device, len(qs[name]))
            of.project(_alone(ps[name], qs[name]), gradient, share, qs[name], ps[name])
        comm.all_reduce(message)
        if means:
            torch._foreach_copy_(list(others.values()), means)
        orthonormalise(ps.values())
        return ps

    def _sums_of_r(
        self, matrices: dict[str, Tensor], ps: dict[str, Tensor], comm: Comm
    ) -> dict[str, Tensor]:
        """Return each R^T, [r, columns], summed over the ranks; take a part of it from momentum."""
        if not matrices:
            return {}
        shapes = [(ps[name].shape[1], matrix.shape[1]) for name, matrix in matrices.items()]
        message, parts = together(shapes, next(iter(matrices.values())))
        rs = dict(zip(matrices, parts, strict=True))
        for name, r in rs.items():
            share = self.moments["share"][name]
            of = low_rank.kernels(share.device, len(r))
            of.project_back(_alone(ps[name], r), share, ps[name], r, subtract=False)
            share.addmm_(ps[name], r, alpha=self.momentum - 1)
        comm.all_reduce(message)
        return rs

    def _direct(self, name: str, p: Tensor, r: Tensor, out: Tensor) -> None:
        """Write the direction of a matrix into `out`, and keep Q for the next step.

        Momentum of a lower rank leaves columns of R that are rounding alone. They get no direction,
        and the next step looks for others where it looked before.
        """
        lengths = r.norm(dim=1, keepdim=True)
        unknown = lengths <= ROUNDING * lengths.max()  # false for NaN, which spreads
        unit = r.div_(lengths).masked_fill_(unknown, 0)
        low_rank.kernels(out.device, len(unit)).rebuild(_alone(p, unit), p, unit, out)
        out.mul_(rms_factor(*out.shape))
        q = self.moments["q"][name]
        torch.where(unknown, q, unit, out=q)

    def redistribute(self, states: list[dict[str, Any]], rank: int, size: int) -> dict[str, Any]:
        """Give each rank an equal share of the momentum; all else was equal on all ranks."""
        new = super().redistribute(states, rank, size)
        new["share"] = shares([state["share"] for state in states], size)
        return new


def _alone(p: Tensor, q: Tensor) -> Factors:
    """Return the places of a matrix that lies by itself, as its factors do."""
    return Factors([(0, len(p), q.shape[1], len(q))])
