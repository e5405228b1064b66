"""Rows that have had a gradient, summed over the ranks in signs, with what the signs left out.

And the factors of a variance by which values are divided, so that those that share the magnitude of
their signs are of one size.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lab.codec.base import Shapes
from lab.codec.codecs import OneBit
from lab.codec.layout import Rows, spans
from lab.distributed.comm import Collective, Comm
from lab.exchange.base import RankOfSize, Staged
from lab.exchange.bucket import GradBucket
from lab.exchange.compressed import Messages
from lab.exchange.cost import Costs, Needs, Sizes
from lab.exchange.direction import Direction, Moments, is_finite
from lab.exchange.memory import shares
from lab.settings import checks

KINDS = ("active", "late", "residual", "shard_residual")
LARGEST = 10.0  # an owner enlarges no sum, and with it no error of signs, by more


class RaggedBlocks(OneBit):
    """1-bit SGD's codec of blocks, of which the last of a parameter may be shorter."""

    def __init__(self, block_size: int) -> None:
        super().__init__(granularity="block", block_size=block_size)

    def rows(self, shapes: Shapes) -> Iterator[Rows]:
        for _, start, stop in spans(shapes):
            if start < stop:
                yield Rows(start, stop, self.block_size)

    def share(self, num_values: int, rank: int, size: int) -> slice:
        """Return the values of a parameter whose sums `rank` of `size` ranks encodes."""
        values = -(-num_values // (self.block_size * size)) * self.block_size
        return slice(min(rank * values, num_values), min((rank + 1) * values, num_values))


@dataclass
class ActiveRows:
    """A parameter in a bucket, some of whose rows are sent.

    Attributes:
        flat: float32 [rows, columns], its place in the bucket.
        active: float32 [active rows, columns], its active rows: `flat` itself, or a copy.
    """

    name: str
    flat: Tensor
    active: Tensor


class _RowPlan(Messages):
    """Where active values lie in messages, and their residuals, kept from step to step."""

    def __init__(
        self, codec: RaggedBlocks, parts: Sequence[ActiveRows], comm: RankOfSize, kept: Any
    ) -> None:
        sizes = {part.name: (part.active.numel(),) for part in parts}
        self.num_values = sum(size for (size,) in sizes.values())
        layout, like = codec.layout(sizes, self.num_values, comm.size), parts[0].flat
        super().__init__(codec, layout, comm, like)
        self.own = layout.part(comm.rank)
        self.reply = self.message.new_zeros(layout.line_bytes)
        self.residual = _together(kept["residual"], sizes, like)
        self.owned = _together(kept["shard_residual"], sizes, like)
        self._first = parts[0].name
        self._views = [kept[kind][self._first] for kind in KINDS[2:]]

    def holds(self, kept: Any) -> bool:
        """Return whether these are still the residuals that are kept."""
        now = [kept[kind][self._first] for kind in KINDS[2:]]
        return all(one is other for one, other in zip(now, self._views, strict=True))


def _together(kept: Moments, names: Iterable[str], like: Tensor) -> Tensor:
    """Move what is kept of some parameters into one tensor, of which the kept ones are views."""
    whole = torch.cat([like.new_empty(0), *(kept[name] for name in names)])
    views = whole.split([kept[name].numel() for name in names])
    kept.update(zip(names, views, strict=True))
    return whole


class SignedDirection(Staged, Direction):
    """Adam whose steps sum active rows in one bit per value, with error feedback at both stages.

    Signs cannot say zero. Rows that have had no gradient (unused tokens, positions beyond the
    sequence) are not active: they are not sent, and come back as zeros. A gradient that such a row
    has later is left out, and the row is counted as late.

    Args:
        betas, eps: see Adam.
        block_size: values that share the two magnitudes of their signs, at least 8.

    Attributes:
        moments: besides Adam's, by parameter: active and late, bool [rows]; residual, float32
            [active values]; shard_residual, float32 [active values that this rank sums].
    """

    def __init__(self, betas: Sequence[float], eps: float, block_size: int) -> None:
        super().__init__(betas, eps)
        self.codec = RaggedBlocks(checks.integer("exchange.block_size", block_size, 8))
        self._rows: Moments = {}  # indices of active rows

    def memory_bytes(self, sizes: Sizes) -> Needs:
        """Count both residuals and messages, as TwoStage does; without moments."""
        part = 1 / sizes.N
        per_value = 4 * (1 + part) + self.codec.bytes_per_value() * (2 + part)
        return Needs(kept=sizes.n * per_value)

    def add_signs(self, costs: Costs, before: int, of_shard: int, after: int) -> bool:
        """Add the stages of a sum in signs, and what an optimizer adds around it.

        Args:
            before, of_shard, after: bytes of memory for a value, of a shard between both stages.
        """
        shapes = {str(number): shape for number, shape in enumerate(costs.shapes)}
        line = self.codec.layout(shapes, costs.n, costs.N).line_bytes
        message, calls = line * costs.N, 2 * len(costs.shapes)
        costs.codec((before + 12) * costs.n + message, calls)
        costs.wire(costs.network.all_to_all(line))
        costs.codec((8 * costs.N + of_shard + 12) * costs.n / costs.N + message, calls)
        costs.wire(costs.network.all_gather(line))
        costs.codec((4 + after) * costs.n + message, calls)
        return True

    def average_exactly(self, bucket: GradBucket, comm: Comm) -> Iterator[Collective]:
        """Average gradients exactly, and direct each parameter by its updated moments."""
        yield comm.iall_reduce(bucket.flat)
        bucket.finite = is_finite(bucket.flat)
        for name, start, stop in bucket.spans():
            gradient = bucket.flat[start:stop]
            moments = self.add_by_adam(name, gradient)
            self.direct_exactly(name, bucket.shapes[name], *moments, out=gradient)

    @abstractmethod
    def direct_exactly(
        self, name: str, shape: torch.Size, momentum: Tensor, variance: Tensor, out: Tensor
    ) -> None:
        """Write a parameter's direction into `out`, after an exact step."""

    def lay_out(self, name: str, active: Tensor, columns: int, comm: RankOfSize) -> None:
        """Choose a parameter's rows, bool [rows], and keep what the signs of earlier ones left out.

        Rows that are active already must be so again. A rank takes its shard's residual over into
        its own, so that shards may be cut anew. The host waits to know how many rows there are.
        """
        kept, before = self.moments, None
        if name in kept["active"]:
            merged = kept["residual"][name]
            share = self.codec.share(merged.numel(), comm.rank, comm.size)
            merged[share] += kept["shard_residual"][name]
            before = self.rows(name), merged.view(-1, columns)
        kept["active"][name] = active
        kept["late"].setdefault(name, torch.zeros_like(active))
        self._rows.pop(name, None)
        keep = self.rows(name)
        # Zeros without memory: a plan moves them into memory of its own.
        residual = torch.zeros((), device=active.device).expand(len(keep) * columns)
        if before:
            residual = residual.clone()
            place = torch.zeros_like(active, dtype=torch.int64)
            place[keep] = torch.arange(len(keep), device=active.device)
            residual.view(-1, columns)[place[before[0]]] = before[1]
        share = self.codec.share(len(residual), comm.rank, comm.size)
        none = torch.zeros((), device=active.device).expand(share.stop - share.start)
        kept["residual"][name], kept["shard_residual"][name] = residual, none

    def rows(self, name: str) -> Tensor:
        """Return the indices of a parameter's active rows."""
        if name not in self._rows:
            self._rows[name] = self.moments["active"][name].nonzero().view(-1)
        return self._rows[name]

    def parts(self, bucket: GradBucket) -> list[ActiveRows]:
        """Return the active rows of a bucket's parameters; look for late ones."""
        found, late = list[ActiveRows](), self.moments["late"]
        for name, start, stop in bucket.spans():
            active, rows = self.moments["active"][name], self.rows(name)
            flat = chosen = bucket.flat[start:stop].view(len(active), -1)
            if len(rows) < len(active):
                late[name] = late[name] | ((flat != 0).any(dim=1) & ~active)
                chosen = flat[rows]
            found.append(ActiveRows(name, flat, chosen))
        return found

    def sum_signs(
        self,
        bucket: GradBucket,
        parts: Sequence[ActiveRows],
        comm: Comm,
        between: Callable[[Tensor], None] | None = None,
    ) -> Iterator[Collective]:
        """Replace the parts' values by their sums over the ranks, and put them into `bucket`.

        Args:
            between: changes the sums that this rank owns, [values], in place before they are sent
                on: of each parameter a part, in their order.
        """
        plan = bucket.plans.get(key := ("signed rows", id(self), comm.size))
        if plan is None or not plan.holds(self.moments):
            plan = bucket.plans[key] = _RowPlan(self.codec, parts, comm, self.moments)
        whole = all(part.active is part.flat for part in parts)
        values = bucket.flat[: plan.num_values]
        if not whole:
            values = torch.cat([part.active.view(-1) for part in parts])
        plan.kernels.encode(plan.layout, values, plan.residual, plan.message, plan.finite)
        yield comm.iall_to_all(plan.received, plan.lines)
        if between is None:
            plan.kernels.reduce(plan.own, plan.received, plan.owned, plan.reply)
        else:
            sums = values[: plan.own.num_values]  # the values have been encoded: memory is free
            plan.kernels.add_up(plan.own, plan.received, sums, 1, plan.finite)
            between(sums)
            plan.kernels.encode(plan.own, sums, plan.owned, plan.reply)
        yield comm.iall_gather(plan.lines, plan.reply)
        plan.kernels.add_up(plan.layout, plan.line, values, 1, plan.finite)
        bucket.finite = plan.finite
        if whole:
            return
        sizes = [part.active.numel() for part in parts]
        for part, own in zip(parts, values.split(sizes), strict=True):
            if part.active is part.flat:
                part.flat.copy_(own.view_as(part.flat))
            else:  # zeros for rows that are not active
                part.flat.zero_()[self.rows(part.name)] = own.view_as(part.active)

    def shard_of(self, values: Tensor, comm: RankOfSize) -> Tensor:
        """Copy those of a parameter's active values that this rank sums."""
        return values[self.codec.share(values.numel(), comm.rank, comm.size)].clone()

    def row_counts(self) -> dict[str, int]:
        """Count the rows that are not sent, and those that this rank found too late."""
        silent = sum(int((~rows).sum()) for rows in self.moments["active"].values())
        late = sum(int(rows.sum()) for rows in self.moments["late"].values())
        return {"silent_rows": silent, "late_rows": late}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._rows = {}

    def redistribute(self, states: list[dict[str, Any]], rank: int, size: int) -> dict[str, Any]:
        """Keep what all ranks share; give each an equal share of residuals, and its shards."""
        new = super().redistribute(states, rank, size)
        new["residual"] = shares([state["residual"] for state in states], size)
        new["shard_residual"] = self.sharded_anew("shard_residual", states, rank, size)
        return new

    def sharded_anew(
        self, kind: str, states: list[dict[str, Any]], rank: int, size: int
    ) -> Moments:
        """Return this rank's shards of what other ranks kept in theirs."""
        whole = {n: torch.cat([state[kind][n] for state in states]) for n in states[0][kind]}
        return {n: v[self.codec.share(v.numel(), rank, size)].clone() for n, v in whole.items()}


def factors(v: Tensor) -> tuple[Tensor, Tensor]:
    """Return two factors of 1 / root of a variance's rank-1 estimate, [rows] and [columns].

    With R and C the means of v over a row and over a column, the root of R C / mean(v) (Shazeer &
    Stern 2018, section 3) is close to the root of v, in the memory of 1/N of it.

    Args:
        v: float32 [rows, columns], no row of which is zero.
    """
    by_row, by_column = v.mean(dim=1), v.mean(dim=0)
    # A column without gradients gets the mean: nothing but the signs' own errors is divided by it.
    of_column = torch.where(by_column > 0, by_row.mean() / by_column, 1.0).sqrt_()
    return by_row.rsqrt(), of_column


def scale(values: Tensor, scales: Tensor, factor: float, out: Tensor) -> None:
    """Write `values` over the factored root of the variance, times `factor`, into `out`.

    Args:
        values, out: float32 [active rows, columns].
        scales: float32 [active rows + columns], a result of `factors`.
    """
    of_row, of_column = scales.split(list(values.shape))
    torch.mul(values, (factor * of_row)[:, None], out=out)
    out.mul_(of_column)


def raise_least(v: Tensor) -> None:
    """Raise values of v far below their row's and column's, in place. The host never waits.

    What is divided by the root of v keeps errors of signs, of the size of the root then. So the
    root of a value without gradients must not be 0, nor fall to that of a first small gradient.

    Args:
        v: float32 [rows, columns]; rows without any gradient stay zeros.
    """
    of_row, of_column = factors(v)
    least = torch.outer(1 / (LARGEST * of_row), 1 / of_column).square_()
    torch.maximum(v, least, out=v)
