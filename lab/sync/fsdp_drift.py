"""Drift in FSDP: do the lab's gathers and scatters deliver what ranks give them, and which not?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lab.distributed.comm import Comm
from lab.exchange.base import Exchange
from lab.exchange.memory import fill_rows
from lab.exchange.scatter import Layout
from lab.sync.findings import Findings, products

WEIGHTS, GRADIENTS = "weights", "gradients"


class FsdpDrift:
    """Compares weights and gradients that the lab moved for a unit with exact ones.

    Units and parts take turns, a window of k steps each. In its last step the weights of a unit are
    gathered exactly as well. Gradients are compared over the window, as lab.sync.drift does: each
    rank adds up residual before + gradients - residual after, and one exact reduce-scatter of that
    is due where the sum of all reduce-scatters was delivered. Sums of squares are added over the
    ranks, so a rank that is wrong alone shows, and all know the same.

    It costs one exact collective of a unit in each window, which the run's payload and times
    include, and memory of the unit's whole gradients.

    Args:
        comm: of all ranks.
        every: steps of a window, k.
        units: names of the units. parts: WEIGHTS, GRADIENTS, or both: what the lab moves.
    """

    def __init__(
        self, exchange: Exchange, comm: Comm, every: int, units: Sequence[str], parts: Sequence[str]
    ) -> None:
        self._exchange, self._comm, self._every = exchange, comm, every
        self._turns = [(part, unit) for unit in units for part in parts]
        name, window = f"exchange={type(exchange).__name__}", f"in the {every} exchanges up to step"
        self._of_gradients = Findings(
            name, comm, window, coarse=not (exchange.exact or exchange.keeps_residuals)
        )
        self._of_weights = Findings("sync.all_gather=int8", comm, "in step")
        self._due: Tensor | None = None
        self._delivered = torch.empty(0)
        self._done = False
        self.begin_step(0)

    def begin_step(self, step: int) -> None:
        """Note which step the next collectives belong to."""
        self._step, self._done = step, False

    def compares_weights(self, unit: str) -> bool:
        """Return whether the next gather of a unit is to be compared."""
        return self._is_turn(WEIGHTS, unit) and self._is_last and not self._done

    def gathered(self, unit: str, own: Tensor, whole: Tensor, comm: Comm) -> None:
        """Compare gathered weights [N * n] with those of an exact gather of all ranks' `own`."""
        due = torch.empty_like(whole)
        comm.all_gather(due, own)
        self._compare(self._of_weights, f"weights of unit {unit}", due, whole.clone())
        self._done = True

    def giving(self, unit: str, gradients: Tensor, layout: Layout) -> None:
        """Add gradients [N, n] that are about to be scattered to what is due."""
        if not self._is_turn(GRADIENTS, unit):
            return
        if self._step % self._every == 0:
            self._due = self._residual(gradients, layout)
            self._delivered = torch.zeros_like(gradients[0])
        if self._due is not None:  # it is, where a run resumes within a window
            self._due += gradients

    def given(self, unit: str, total: Tensor, layout: Layout, comm: Comm) -> None:
        """Add this rank's part of a sum [n] to what is delivered; compare when a window is full."""
        if not self._is_turn(GRADIENTS, unit) or self._due is None:
            return
        self._delivered += total
        if not self._is_last:
            return
        self._due -= self._residual(self._due, layout)
        due = torch.empty_like(total)
        comm.reduce_scatter(due, self._due)
        self._compare(self._of_gradients, f"gradients of unit {unit}", due, self._delivered)
        self._due = None

    def end_step(self) -> None:
        """Read what has arrived."""
        self._of_weights.read_arrived()
        self._of_gradients.read_arrived()

    def results(self) -> list[dict[str, Any]]:
        """Return what each window found, see lab.sync.findings.Findings.all."""
        found = [*self._of_weights.all(), *self._of_gradients.all()]
        return sorted(found, key=lambda window: window["step"])

    @property
    def _is_last(self) -> bool:
        return self._step % self._every == self._every - 1

    def _is_turn(self, part: str, unit: str) -> bool:
        return self._turns[self._step // self._every % len(self._turns)] == (part, unit)

    def _compare(self, findings: Findings, part: str, due: Tensor, delivered: Tensor) -> None:
        sums = products(due, delivered)
        self._comm.all_reduce(sums)
        findings.add(part, self._step, sums)

    def _residual(self, gradients: Tensor, layout: Layout) -> Tensor:
        """Return a copy of this rank's residuals, laid out as `gradients` [N, n]."""
        copy = torch.zeros_like(gradients)
        kept = self._exchange.state_dict().get("residual", {})
        for name, at in layout.columns.items():
            if name in kept:
                view = copy[:, at.start : at.stop].view(len(copy), -1, at.inner)
                fill_rows(view, kept[name])
        return copy
