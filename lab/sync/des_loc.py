"""DesLoc: ranks train on their own, and average weights and moments at periods of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lab.sync.base import SyncParts
from lab.sync.local import LocalSteps
from lab.sync.pattern import des_loc

FIRST = ("exp_avg", "momentum_buffer")  # a first moment, as optimizers of torch name it
SECOND = ("exp_avg_sq",)


class DesLoc(LocalSteps):
    """Desynchronised local steps (Iacob et al., ICLR 2026, arXiv 2505.22549, "DES-LOC").

    Each rank takes steps with its own gradients. After each step whose number is a multiple of
    `every` (the paper's K_x) weights become their mean over the ranks; of `first_every` (K_u), the
    optimizer's first moments; of `second_every` (K_v), its second moments. Slowly changing moments
    need fewer exchanges. With three equal periods this is Local Adam. Weights are averaged after
    the run's last step too.

    The values themselves are exchanged, not their changes, so the exchange must be exact: rounded
    towards 0, a second moment would make Adam's next step arbitrarily large.

    Args:
        every, first_every, second_every: in steps; `second_every` None: the optimizer has none.

    Raises:
        ValueError: a period is no integer of at least 1, or the exchange is not exact.
    """

    def __init__(
        self, parts: SyncParts, *, every: int, first_every: int, second_every: int | None
    ) -> None:
        super().__init__(parts, des_loc(every, first_every, second_every))
        if not parts.exchange.exact:
            name = type(parts.exchange).__name__
            raise ValueError(f"exchange={name}: is not exact; second moments need one that is")
        self.weights_every = every
        self.moments = {"first_every": (first_every, FIRST), "second_every": (second_every, SECOND)}
        self.optimizer: Optimizer | None = None  # known from the first update on

    def update(self, optimizer: Optimizer) -> None:
        """Take the optimizer's step.

        Raises:
            ValueError: the optimizer has no moment of a kind that is to be averaged.
        """
        super().update(optimizer)
        if self.optimizer is optimizer:
            return
        self.optimizer = optimizer
        for key, (period, names) in self.moments.items():
            if period is not None and not self._moments(names):
                kind = type(optimizer).__name__
                null = " or null" if key == "second_every" else ""
                raise ValueError(
                    f"sync.{key}={period}: {kind} keeps no {' or '.join(names)}; "
                    f"must be optim=adamw{null}"
                )

    @torch.no_grad()
    def after_update(self, last: bool) -> Tensor | None:
        self.step += 1
        weights_due = last or self.step % self.weights_every == 0
        self.in_round = not weights_due
        if weights_due:
            self._average_values({name: p.detach() for name, p in self.parameters.items()})
        for period, names in self.moments.values():
            if period is not None and self.step % period == 0:
                self._average_values(self._moments(names))
        return None  # exact exchanges do not check

    def _average_values(self, values: dict[str, Tensor]) -> None:
        """Replace `values`, by parameter, by their means over the ranks."""
        for name, value in values.items():
            self.parameters[name].grad = value
        self._average()
        for name, value in values.items():
            mean = self.parameters[name].grad
            assert mean is not None
            if mean.data_ptr() != value.data_ptr():  # else exchanged in place
                value.copy_(mean)
        for parameter in self.parameters.values():
            parameter.grad = None

    def _moments(self, names: tuple[str, ...]) -> dict[str, Tensor]:
        """Return the moment with one of `names`, of each parameter that has it."""
        assert self.optimizer is not None  # an update came first
        found: dict[str, Tensor] = {}
        for parameter, p in self.parameters.items():
            state: dict[str, Any] = self.optimizer.state.get(p, {})
            for name in names:
                if isinstance(value := state.get(name), Tensor):
                    found[parameter] = value
        return found
