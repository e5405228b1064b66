"""Rows that have had a gradient, summed over the ranks in signs, with what the signs left out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lab.codec.base import Shapes
from lab.codec.layout import Rows, spans
from lab.codec.onebit import OneBit
from lab.distributed.comm import Collective, Comm
from lab.exchange.base import Ranks
from lab.exchange.bucket import GradBucket
from lab.exchange.cost import Costs, Needs, Sizes
from lab.exchange.direction import Moments, copies
from lab.exchange.memory import shares
from lab.settings import checks

KINDS = ("active", "late", "residual", "shard_residual")


class Blocks(OneBit):
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
class Part:
    """A parameter in a bucket, some of whose rows are sent.

    Attributes:
        flat: float32 [rows, columns], its place in the bucket.
        active: float32 [active rows, columns], its active rows: `flat` itself, or a copy.
    """

    name: str
    flat: Tensor
    active: Tensor

    def put_back(self, values: Tensor, keep: Tensor) -> None:
        """Write active rows, [active values], to their place in the bucket, and zeros elsewhere."""
        if self.active is self.flat:
            self.flat.copy_(values.view_as(self.flat))
            return
        self.flat.zero_()
        self.flat[keep] = values.view_as(self.active)


class _Plan:
    """The part that stays from step to step: where active values lie in messages, and residuals."""

    def __init__(self, codec: Blocks, parts: Sequence[Part], comm: Ranks, kept: Any) -> None:
        sizes = {part.name: (part.active.numel(),) for part in parts}
        self.num_values = sum(size for (size,) in sizes.values())
        self.layout = codec.layout(sizes, self.num_values, comm.size)
        self.own = self.layout.part(comm.rank)
        like = parts[0].flat
        self.kernels = codec.kernels(like.device)
        self.sent = like.new_zeros(self.layout.num_bytes, dtype=torch.uint8)
        self.received = self.sent.new_empty(comm.size, self.layout.line_bytes)
        self.reply = self.sent.new_zeros(self.layout.line_bytes)
        self.finite = torch.ones((), dtype=torch.bool, device=like.device)
        self.residual = _together(kept["residual"], sizes, like)
        self.owned = _together(kept["shard_residual"], sizes, like)
        self._first = parts[0].name
        self._views = tuple(kept[kind][self._first] for kind in ("residual", "shard_residual"))

    def holds(self, kept: Any) -> bool:
        """Return whether these are still the residuals that are kept."""
        kinds = "residual", "shard_residual"
        return all(kept[kind][self._first] is v for kind, v in zip(kinds, self._views, strict=True))


def _together(kept: Moments, names: Iterable[str], like: Tensor) -> Tensor:
    """Move what is kept of some parameters into one tensor, of which the kept ones are views."""
    whole = torch.cat([like.new_empty(0), *(kept[name] for name in names)])
    views = whole.split([kept[name].numel() for name in names])
    kept.update(zip(names, views, strict=True))
    return whole


class SignedRows:
    """Sums of parameters' active rows in one bit per value, with error feedback at both stages.

    Signs cannot say zero. Rows that have had no gradient (unused tokens, positions beyond the
    sequence) are not active: they are not sent, and come back as zeros. A gradient that such a row
    has later is left out, and the row is counted as late.

    Args:
        block_size: values that share the two magnitudes of their signs, at least 8.

    Attributes:
        kept: by kind and parameter: active and late, bool [rows]; residual, float32 [active
            values]; shard_residual, float32 [active values that this rank sums].
    """

    def __init__(self, block_size: int) -> None:
        checks.whole("exchange.block_size", block_size, 8)
        self.codec = Blocks(block_size)
        self.kept: dict[str, Moments] = {kind: {} for kind in KINDS}
        self._rows: Moments = {}  # indices of active rows

    def add_cost(self, costs: Costs, before: int, of_shard: int, after: int) -> bool:
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

    def memory_bytes(self, sizes: Sizes) -> Needs:
        """Count both residuals, and messages as lab.exchange.coded.TwoStage does."""
        part = 1 / sizes.N
        per_value = 4 * (1 + part) + self.codec.bytes_per_value() * (2 + part)
        return Needs(kept=sizes.n * per_value)

    def __contains__(self, name: str) -> bool:
        return name in self.kept["active"]

    def lay_out(self, name: str, active: Tensor, columns: int, comm: Ranks) -> None:
        """Choose a parameter's rows, bool [rows], and keep what the signs of earlier ones left out.

        Rows that are active already must be so again.

        A rank takes its shard's residual over into its own, so that shards may be cut anew. The
        host waits to know how many rows there are.
        """
        before = (self.rows(name), self._merged(name, comm)) if name in self else None
        late = self.kept["late"].get(name, torch.zeros_like(active))
        self.kept["active"][name], self.kept["late"][name] = active, late
        self._rows.pop(name, None)
        keep = self.rows(name)
        # Zeros without memory: a plan moves them into memory of its own.
        residual = torch.zeros((), device=active.device).expand(len(keep) * columns)
        if before:
            residual = residual.clone()
            place = torch.zeros_like(active, dtype=torch.int64)
            place[keep] = torch.arange(len(keep), device=active.device)
            residual.view(-1, columns)[place[before[0]]] = before[1].view(-1, columns)
        self.kept["residual"][name] = residual
        share = self.codec.share(len(residual), comm.rank, comm.size)
        none = torch.zeros((), device=active.device).expand(share.stop - share.start)
        self.kept["shard_residual"][name] = none

    def _merged(self, name: str, comm: Ranks) -> Tensor:
        """Return this rank's residual with its shard's residual added, in the residual's memory."""
        residual = self.kept["residual"][name]
        share = self.codec.share(residual.numel(), comm.rank, comm.size)
        residual[share] += self.kept["shard_residual"][name]
        return residual

    def scale_residuals(self, name: str, factors: Tensor, comm: Ranks) -> None:
        """Multiply a parameter's residuals, as the units of its values change.

        Args:
            factors: float32 [active values].
        """
        self.kept["residual"][name].mul_(factors)
        self.kept["shard_residual"][name].mul_(self.shard_of(name, factors, comm))

    def rows(self, name: str) -> Tensor:
        """Return the indices of a parameter's active rows."""
        if name not in self._rows:
            self._rows[name] = self.kept["active"][name].nonzero().view(-1)
        return self._rows[name]

    def part(self, bucket: GradBucket, name: str, start: int, stop: int) -> Part:
        """Return the active rows of a parameter's span in `bucket`; look for late ones."""
        active = self.kept["active"][name]
        flat = bucket.flat[start:stop].view(len(active), -1)
        rows, chosen = self.rows(name), flat
        if len(rows) < len(active):
            late = self.kept["late"]
            late[name] = late[name] | ((flat != 0).any(dim=1) & ~active)
            chosen = flat[rows]
        return Part(name, flat, chosen)

    def stages(
        self,
        bucket: GradBucket,
        parts: Sequence[Part],
        comm: Comm,
        between: Callable[[Tensor], None] | None = None,
    ) -> Iterator[Collective]:
        """Replace the parts' values by their sums over the ranks, and put them into `bucket`.

        Args:
            between: changes the sums that this rank owns, [values], in place before they are sent
                on: of each parameter a part, in their order.
        """
        plan = bucket.plans.get(key := ("signed rows", id(self), comm.size))
        if plan is None or not plan.holds(self.kept):
            plan = bucket.plans[key] = _Plan(self.codec, parts, comm, self.kept)
        whole = all(part.active is part.flat for part in parts)
        values = bucket.flat[: plan.num_values]
        if not whole:
            values = torch.cat([part.active.view(-1) for part in parts])
        plan.kernels.encode(plan.layout, values, plan.residual, plan.sent, plan.finite)
        yield comm.iall_to_all(plan.received, plan.sent.view_as(plan.received))
        if between is None:
            plan.kernels.reduce(plan.own, plan.received, plan.owned, plan.reply)
        else:
            sums = values[: plan.own.num_values]  # the values have been encoded: memory is free
            plan.kernels.add_up(plan.own, plan.received, sums, 1, plan.finite)
            between(sums)
            plan.kernels.encode(plan.own, sums, plan.owned, plan.reply)
        yield comm.iall_gather(plan.sent.view_as(plan.received), plan.reply)
        plan.kernels.add_up(plan.layout, plan.sent.view(1, -1), values, 1, plan.finite)
        bucket.finite = plan.finite
        if not whole:
            sizes = [part.active.numel() for part in parts]
            for part, own in zip(parts, values.split(sizes), strict=True):
                part.put_back(own, self.rows(part.name))

    def shard_of(self, name: str, values: Tensor, comm: Ranks) -> Tensor:
        """Copy those of a parameter's active values that this rank sums."""
        return values[self.codec.share(values.numel(), comm.rank, comm.size)].clone()

    def counts(self) -> dict[str, int]:
        """Count the rows that are not sent, and those that this rank found too late."""
        silent = sum(int((~rows).sum()) for rows in self.kept["active"].values())
        late = sum(int(rows.sum()) for rows in self.kept["late"].values())
        return {"silent_rows": silent, "late_rows": late}

    def state_dict(self) -> dict[str, Moments]:
        return {kind: dict(kept) for kind, kept in self.kept.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kept = {kind: copies(state[kind]) for kind in KINDS}
        self._rows = {}

    def redistribute(self, states: list[dict[str, Any]], rank: int, size: int) -> dict[str, Any]:
        """Give each rank an equal share of the residuals' sum, and its shard of the others'."""
        new: dict[str, Any] = {kind: dict(states[0][kind]) for kind in ("active", "late")}
        new["residual"] = shares([state["residual"] for state in states], size)
        new["shard_residual"] = self.sharded_anew("shard_residual", states, rank, size)
        return new

    def sharded_anew(
        self, kind: str, states: list[dict[str, Any]], rank: int, size: int
    ) -> Moments:
        """Return this rank's shards of what other ranks kept in theirs."""
        new: Moments = {}
        for name in states[0][kind]:
            whole = torch.cat([state[kind][name] for state in states])
            new[name] = whole[self.codec.share(whole.numel(), rank, size)].clone()
        return new
