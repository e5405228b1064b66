"""Orthonormal updates: Muon, of whole matrices, each by one rank; Dion, of low rank, by all."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from lab.codec.layout import Factors, together
from lab.distributed.comm import Collective, Comm
from lab.exchange.base import Staged
from lab.exchange.bucket import GradBucket
from lab.exchange.cost import Costs, Needs, Sizes
from lab.exchange.direction import MatrixDirection, is_finite, zeros
from lab.exchange.layout import Matrix, hidden_matrices, rank_of, trainable
from lab.exchange.memory import shares
from lab.exchange.powersgd import factor_kernels, orthonormalise, random_factor
from lab.settings import checks

DTYPES = {"auto": None, "bfloat16": torch.bfloat16, "float32": torch.float32}
ROUNDING = 1e-6  # a column of R is nothing else, if its norm is this share of the largest one's
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan et al. 2024: the steepest slope at zero
SMALLEST = 1e-7  # norm below which a matrix is not scaled up


class Muon(Staged, MatrixDirection):
    """Muon (Jordan et al. 2024) for hidden matrices, Adam for all else, with the work shared.

    1. The parts of all gradients go to their owners, all to all, which sum them in rank order. A
       matrix has one owner; vectors, embeddings and the output layer are owned in equal parts.
       lab.exchange.direction tells which is which.
    2. An owner updates its moments. Of a matrix's momentum, with Nesterov's look ahead, it takes
       the nearest orthogonal matrix; elsewhere Adam's direction. All ranks gather the directions.

    So all ranks have the same bits, no rank repeats another's products, moments take 4/N bytes for
    a value of a matrix and 8/N elsewhere, and a balanced bucket sends a ring's 8n(N-1)/N bytes.
    Lines of a message are as long as the fullest: of a bucket with one matrix, N times that. One
    bucket for all parameters is best.

    Args:
        momentum: decay rate. nesterov: look ahead. steps: of Newton–Schulz.
        dtype: of its products, bfloat16, float32, or auto: bfloat16 on GPUs that compute in it
            (compute capability 8.0 and above), float32 on others and on CPUs.
        betas, eps: of Adam. adam, matrices: see MatrixDirection.
    """

    kinds = ("momentum", "variance")

    def __init__(
        self,
        momentum: float = 0.95,
        nesterov: bool = True,
        steps: int = 5,
        dtype: str = "auto",
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam: Sequence[str] = (),
        matrices: Sequence[str] = (),
    ) -> None:
        super().__init__(adam, matrices, betas, eps)
        self.momentum = checks.number("exchange.momentum", momentum, at_least=0, below=1)
        self.nesterov = checks.truth("exchange.nesterov", nesterov)
        self.steps = checks.integer("exchange.steps", steps, 1)
        self.dtype = DTYPES[checks.one_of("exchange.dtype", dtype, DTYPES)]
        self._sizes: dict[str, int] = {}  # of the whole model
        self._matrices: dict[str, Matrix] = {}
        self._owner: dict[str, int] = {}

    def setup(self, model: nn.Module) -> None:
        super().setup(model)
        self._measure({name: p.shape for name, p in trainable(model).items()})

    def _measure(self, shapes: Mapping[str, torch.Size]) -> None:
        self._sizes = {name: shape.numel() for name, shape in shapes.items()}
        self._matrices = self.plan(shapes).matrices

    def add_cost(self, costs: Costs) -> bool:
        """Count copies to and from a message, moments, and Newton–Schulz of each rank's matrices.

        Lines of a message are as long as the fullest.
        """
        shapes = {str(number): shape for number, shape in enumerate(costs.shapes)}
        work = self._operations(hidden_matrices(shapes))
        owner, operations = balanced(work, costs.N), [0.0] * costs.N
        for name, rank in owner.items():
            operations[rank] += work[name]
        line = 4 * lines(shapes, owner, costs.N)[1]
        costs.codec(8 * costs.n)
        costs.wire(costs.network.all_to_all(line))
        costs.codec(12 * costs.n)
        costs.products(operations)
        costs.wire(costs.network.all_gather(line))
        costs.codec(8 * costs.n)
        return True

    def memory_bytes(self, sizes: Sizes) -> Needs:
        """Count sent and received lines, and momentum; one matrix alone is all its owner's."""
        if sizes.gathered:
            return Needs(kept=8 * sizes.n + 4 * sizes.n / sizes.N)
        return Needs(kept=8 * sizes.n * sizes.N + (0 if sizes.rank else 4 * sizes.n))

    def stages(self, bucket: GradBucket, comm: Comm) -> Iterator[Collective]:
        self.begin(bucket, comm)
        places, width = lines(bucket.shapes, self._owners(bucket, comm.size), comm.size)
        plans, like = bucket.plans, bucket.flat
        message = plans.scratch("message", like, comm.size, width)
        received = plans.scratch("received", like, comm.size, width)
        spans = {name: bucket.flat[start:stop] for name, start, stop in bucket.spans()}
        for place in places:
            values, own = spans[place.name], place.of(message)
            if missing := own.numel() - len(values):
                values = nn.functional.pad(values, (0, missing))
            own.copy_(values.view_as(own))
        yield comm.iall_to_all(received, message)
        own = received[0]
        for line in received[1:]:
            own += line
        for place in places:
            if place.owner in (None, comm.rank):
                self._direct(place, own[place.start : place.start + place.length])
        yield comm.iall_gather(message, own)
        for place in places:
            values = spans[place.name]
            values.copy_(place.of(message).reshape(-1)[: len(values)])
        bucket.finite = is_finite(bucket.flat)

    def _owners(self, bucket: GradBucket, size: int) -> dict[str, int]:
        """Return the owner of each matrix of the model; of the bucket, if there is no model."""
        if not self._sizes:
            self._measure(bucket.shapes)
        if not self._owner:
            self._owner = balanced(self._operations(self._matrices), size)
        return self._owner

    def _operations(self, matrices: Mapping[str, Matrix]) -> dict[str, int]:
        """Count the operations of Newton–Schulz for each matrix."""
        return {name: newton_schulz_operations(*m, self.steps) for name, m in matrices.items()}

    def _direct(self, place: MessagePlace, gradient: Tensor) -> None:
        """Turn a gradient that this rank owns into the direction."""
        if place.owner is None:
            self.direct_by_adam(place.name, gradient)
            return
        momentum = zeros(self.moments["momentum"], place.name, gradient)
        rows, columns = self._matrices[place.name]
        self.dtype = self.dtype or native_dtype(gradient.device)
        momentum.lerp_(gradient, 1 - self.momentum)
        ahead = gradient.lerp_(momentum, self.momentum) if self.nesterov else momentum
        update = orthogonalised(ahead.view(rows, columns), self.steps, self.dtype)
        gradient.view(rows, columns).copy_(update).mul_(rms_factor(rows, columns))

    def choices(self) -> list[dict[str, Any]]:
        """Return each rank's operations of Newton–Schulz in a step, its dtype, and the plan."""
        work = [0] * (max(self._owner.values(), default=0) + 1)
        for name, cost in self._operations(self._matrices).items():
            work[self._owner[name]] += cost
        dtype = str(self.dtype).removeprefix("torch.") if self.dtype else None
        own = {"newton_schulz_operations": work, "dtype": dtype}
        return [{**own, **plan} for plan in super().choices() or [{}]]

    def redistribute(self, states: list[dict[str, Any]], rank: int, size: int) -> dict[str, Any]:
        """Give each matrix's momentum to its new owner, and cut Adam's moments anew."""
        owner = balanced(self._operations(self._matrices), size)
        new = super().redistribute(states, rank, size)
        for kind in self.kinds:
            new[kind] = {}
            for name in dict.fromkeys(name for state in states for name in state[kind]):
                whole = torch.cat([s[kind][name] for s in states if name in s[kind]])
                if name not in owner:
                    values = whole[: self._sizes[name]]
                    new[kind][name] = part_of(values, rank, size)
                elif owner[name] == rank:
                    new[kind][name] = whole
        return new


def native_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype in which a device multiplies fastest: bfloat16 only where it is native."""
    is_native = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    return torch.bfloat16 if is_native else torch.float32


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


@dataclass(frozen=True)
class MessagePlace:
    """A parameter's values in the message of its owner, or in those of all ranks.

    Attributes:
        owner: rank that owns all of it; None: each rank owns an equal part.
        start: first value in the owner's line; in all lines if there is no owner.
        length: values in a line.
    """

    name: str
    owner: int | None
    start: int
    length: int

    def of(self, message: Tensor) -> Tensor:
        """Return the values in `message`, [ranks, length of a line]: [ranks that own some, n]."""
        lines = slice(None) if self.owner is None else slice(self.owner, self.owner + 1)
        return message[lines, self.start : self.start + self.length]


def balanced(costs: Mapping[str, float], size: int) -> dict[str, int]:
    """Assign each item to one of `size` ranks, the dearest first, to whoever has least so far.

    It is Graham's rule of 1969: the busiest rank has at most 4/3 of what the best plan gives it.
    """
    loads, owner = [0.0] * size, dict[str, int]()
    for name in sorted(costs, key=lambda name: (-costs[name], name)):
        owner[name] = loads.index(min(loads))
        loads[owner[name]] += costs[name]
    return owner


def lines(
    shapes: Mapping[str, Sequence[int]], owner: Mapping[str, int], size: int
) -> tuple[list[MessagePlace], int]:
    """Lay out a bucket as one line for each rank; return the places, and the length of a line.

    Exchange and cost use the same plan.
    """
    filled, places = [0] * size, list[MessagePlace]()
    for name, shape in shapes.items():
        if name in owner:
            rank, length = owner[name], math.prod(shape)
            places.append(MessagePlace(name, rank, filled[rank], length))
            filled[rank] += length
    width = max(filled)
    for name, shape in shapes.items():
        if name not in owner:
            length = -(-math.prod(shape) // size)
            places.append(MessagePlace(name, None, width, length))
            width += length
    return places, width


def newton_schulz_operations(rows: int, columns: int, steps: int) -> int:
    """Count the operations that orthogonalise a matrix: 2 for a product and a sum."""
    short, long = sorted((rows, columns))
    return steps * (4 * short * short * long + 2 * short**3)


def part_of(values: Tensor, rank: int, size: int) -> Tensor:
    """Return the part of `values` that `rank` of `size` ranks owns; zeros fill the last ones up."""
    length = -(-len(values) // size)
    part = values[rank * length : (rank + 1) * length]
    return nn.functional.pad(part, (0, length - len(part)))


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
            of = factor_kernels(gradient.device, len(qs[name]))
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
            of = factor_kernels(share.device, len(r))
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
        factor_kernels(out.device, len(unit)).rebuild(_alone(p, unit), p, unit, out)
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
    return _places(len(p), q.shape[1], len(q))


@cache  # a table is made once for each shape, not in every step
def _places(rows: int, columns: int, rank: int) -> Factors:
    return Factors([(0, rows, columns, rank)])
