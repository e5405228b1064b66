"""Rows that have had a gradient, summed over the ranks in signs, with what the signs left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lab.codec.onebit.message import Matrix
from lab.distributed.collective import Collective
from lab.distributed.comm import Comm
from lab.exchange import blocks
from lab.exchange.base import Ranks
from lab.exchange.bucket import GradBucket
from lab.exchange.direction import Moments, copies, require_integer
from lab.exchange.error_feedback import shares
from lab.exchange.two_stage import TwoStageSum

KINDS = ("active", "late", "residual", "shard_residual")


@dataclass
class Part:
    """A parameter in a bucket, some of whose rows are sent.

    Attributes:
        flat: float32 [rows, columns], its place in the bucket.
        active: float32 [active rows, columns], its active rows: `flat` itself, or a copy.
        matrices: blocks of the active values.
    """

    name: str
    flat: Tensor
    active: Tensor
    matrices: list[Matrix]

    def put_back(self, keep: Tensor) -> None:
        """Write active rows to their place in the bucket, and zeros to the others."""
        if self.active is not self.flat:
            self.flat.zero_()
            self.flat[keep] = self.active


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
        require_integer("block_size", block_size, 8)
        self.block_size = block_size
        self.kept: dict[str, Moments] = {kind: {} for kind in KINDS}
        self._rows: Moments = {}  # indices of active rows

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
        residual = torch.zeros(len(keep), columns, device=active.device)
        if before:
            place = torch.zeros_like(active, dtype=torch.int64)
            place[keep] = torch.arange(len(keep), device=active.device)
            residual[place[before[0]]] = before[1].view(-1, columns)
        self.kept["residual"][name] = residual.flatten()
        shard = self.shard_of(name, self.kept["residual"][name], comm)
        self.kept["shard_residual"][name] = shard.zero_()

    def _merged(self, name: str, comm: Ranks) -> Tensor:
        """Return this rank's residual with its shard's residual added, in the residual's memory."""
        residual, parts = self.kept["residual"][name], self.blocks(name)
        shard = self.kept["shard_residual"][name]
        cut = blocks.views_of_shard(shard, parts, comm.rank, comm.size)
        for part, rows in zip(parts, cut, strict=True):
            part.view(residual)[part.shard(comm.rank, comm.size)] += rows
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
        return Part(name, flat, chosen, self.blocks(name))

    def stages(
        self,
        bucket: GradBucket,
        parts: Sequence[Part],
        comm: Comm,
        between: Callable[[list[Tensor]], None] | None = None,
    ) -> Iterator[Collective]:
        """Replace the parts' values by their sums over the ranks, and put them into `bucket`.

        Args:
            between: changes the sums that this rank owns in place before they are sent on.
        """
        matrices = [matrix for part in parts for matrix in part.matrices]
        values = [m.view(part.active.view(-1)) for part in parts for m in part.matrices]
        residuals = [m.view(self.kept["residual"][m.name]) for m in matrices]
        shard_residuals = self.views_of_shard(self.kept["shard_residual"], parts, comm)
        total = TwoStageSum(matrices, comm, bucket.flat, bucket.buffers)
        sums = total.message("gathered", comm.size)
        yield from total.stages(values, residuals, shard_residuals, sums, between=between)
        bucket.finite = sums.deliver(values)
        for part in parts:
            part.put_back(self.rows(part.name))

    def blocks(self, name: str) -> list[Matrix]:
        return blocks.blocks(name, self.kept["residual"][name].numel(), self.block_size)

    def shard_of(self, name: str, values: Tensor, comm: Ranks) -> Tensor:
        """Copy those of a parameter's active values that this rank sums."""
        parts = blocks.blocks(name, values.numel(), self.block_size)
        return blocks.shard_of(values, parts, comm.rank, comm.size)

    def views_of_shard(self, shards: Moments, parts: Sequence[Part], comm: Ranks) -> list[Tensor]:
        """Return this rank's rows of what is kept in shards, for each matrix of `parts`."""
        where = comm.rank, comm.size
        each = [blocks.views_of_shard(shards[p.name], p.matrices, *where) for p in parts]
        return [rows for views in each for rows in views]

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
            num_values = states[0]["residual"][name].numel()
            parts = blocks.blocks(name, num_values, self.block_size)
            whole = blocks.joined([state[kind][name] for state in states], parts)
            new[name] = blocks.shard_of(whole, parts, rank, size)
        return new
