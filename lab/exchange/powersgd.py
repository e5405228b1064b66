"""PowerSGD: low-rank approximation of gradients by one step of power iteration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from lab.codec.powersgd import codec as powersgd
from lab.distributed.collective import Collective
from lab.distributed.comm import Comm
from lab.exchange.base import Shapes, Staged
from lab.exchange.bucket import GradBucket
from lab.exchange.compressible import low_rank
from lab.exchange.error_feedback import ErrorFeedback
from lab.exchange.low_rank import orthonormal, random_factor, together
from lab.exchange.uncompressed import ExactMeans, gaps


class PowerSGD(Staged, ErrorFeedback):
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
        error_feedback: see ErrorFeedback.

    Raises:
        ValueError: an argument out of range.
    """

    needs_like_gpus = True  # each rank orthogonalises P and multiplies it by Q

    def __init__(self, rank: int = 2, error_feedback: bool = True) -> None:
        super().__init__(error_feedback)
        if not isinstance(rank, int) or rank < 1:
            raise ValueError(f"exchange.rank={rank}: must be an integer of at least 1")
        self.rank = rank
        self.q: dict[str, Tensor] = {}  # Q^T [r, columns] by parameter, equal on all ranks

    def stages(self, bucket: GradBucket, comm: Comm) -> Iterator[Collective]:
        second = comm.beside("second stage")
        spans = {
            name: slice(start, stop)
            for name, start, stop in bucket.spans()
            if low_rank(bucket.shapes[name], self.rank)
        }
        exact = ExactMeans(bucket, gaps(spans.values(), len(bucket.flat)), comm)
        if not spans:
            yield exact.collective
            exact.put_back()
            return
        means = [bucket.flat[span].view(bucket.shapes[n][0], -1) for n, span in spans.items()]
        qs = [self._warm_start(name, mean) for name, mean in zip(spans, means, strict=True)]
        message, ps, matrices = self._project(dict(zip(spans, means, strict=True)), qs)
        summed = comm.iall_reduce(message)
        yield exact.collective
        exact.put_back()
        yield summed
        ps = [orthonormal(p) for p in ps]
        message, new_qs = self._project_back(matrices, ps)
        yield second.iall_reduce(message)
        message.div_(comm.size)
        for p, q, kept, mean in zip(ps, new_qs, qs, means, strict=True):
            kept.copy_(q)
            powersgd.rebuild(p, q, mean)

    def left_exact(self, shapes: Shapes, key: str = "exchange") -> Iterator[tuple[int, str]]:
        which = f"vectors, and matrices no larger than factors of {key}.rank={self.rank}"
        sizes = (shape.numel() for shape in shapes.values() if not low_rank(shape, self.rank))
        yield sum(sizes), which

    def _project(
        self, gradients: dict[str, Tensor], qs: list[Tensor]
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Add the residuals to the gradients, and multiply by the last step's Q.

        Returns:
            Each parameter's MQ, [rows, r], as a message and as views of it, and its
            M = gradient + residual, [rows, columns].
        """
        shapes = [(len(gradient), self.rank) for gradient in gradients.values()]
        message, ps = together(shapes, qs[0])
        matrices = []
        for (name, gradient), q, p in zip(gradients.items(), qs, ps, strict=True):
            residual = self.residual_of(name, gradient.view(-1))
            kept = None if residual is None else residual.view_as(gradient)
            powersgd.project(gradient, kept, q, p)
            matrices.append(gradient if kept is None else kept)
        return message, ps, matrices

    def _project_back(
        self, matrices: list[Tensor], ps: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Return each matrix's (M^T P)^T, [r, columns], as a message and as views of it.

        P Q^T is subtracted from each M.
        """
        message, qs = together([(self.rank, matrix.shape[1]) for matrix in matrices], matrices[0])
        for matrix, p, q in zip(matrices, ps, qs, strict=True):
            powersgd.project_back(matrix, p, q, subtract=self.error_feedback)
        return message, qs

    def _warm_start(self, name: str, matrix: Tensor) -> Tensor:
        """Return the last step's Q^T; in the first step random values, the same on all ranks."""
        if name not in self.q:
            self.q[name] = random_factor(name, self.rank, matrix.shape[1], matrix.device)
        return self.q[name]

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"q": dict(self.q)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.q = {name: value.clone() for name, value in state["q"].items()}

    def redistribute(self, states: list[dict[str, Any]], rank: int, size: int) -> dict[str, Any]:
        """Share residuals as ErrorFeedback does; every rank had the same Q."""
        return super().redistribute(states, rank, size) | {"q": dict(states[0]["q"])}
