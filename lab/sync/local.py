"""LocalSync: ranks train on their own, and average their weights every few steps.

LocalSteps is what it shares with other syncs of ranks that train on their own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

import torch
from torch import Tensor

from lab.exchange.base import require_mean
from lab.exchange.layout import is_fusible
from lab.sync.base import SyncParts, SyncState
from lab.sync.gradsync import GradSync
from lab.sync.pattern import Pattern, is_number, is_whole, local


class LocalSteps(GradSync):
    """A sync whose ranks take steps with their own gradients, and exchange after some updates.

    Attributes:
        in_round: ranks may have different weights.

    Raises:
        ValueError: an exchange that does not average.
    """

    asks_who_reached = False  # what is sent is a change of weights, which every rank has

    def __init__(self, parts: SyncParts, pattern: Pattern) -> None:
        require_mean("exchange", parts.exchange)
        super().__init__(parts, pattern)
        self.divides_loss = False
        self._follow(list(self._buckets_of))  # no exchange waits for backward: any order will do
        self.in_round = False

    @property
    def keeps_replicas_equal(self) -> bool:
        return not self.in_round

    def __enter__(self) -> Self:
        return self  # without GradSync's hooks: no bucket waits for a gradient

    def finish(self) -> None:
        """Leave each rank its own gradients."""

    def _average(self) -> Tensor | None:
        """Replace all `grad` by their means over the ranks; see Sync.finish."""
        step = self.step
        finite = super().finish()
        self.step = step  # which the caller counts
        return finite


class LocalSync(LocalSteps):
    """Local SGD, with an outer optimizer (Douillard et al. 2023, "DiLoCo", algorithm 1).

    All ranks begin a round with the same weights, the anchor, and take `every` steps with their own
    gradients. Then `anchor - weights` is exchanged as GradSync exchanges gradients. Its mean is the
    gradient by which an outer SGD with Nesterov momentum moves the anchor, where all ranks begin
    the next round. With `outer_lr=1` and no outer momentum the anchor moves to the mean of the
    weights: local SGD (Stich 2019, algorithm 1; Lin et al. 2020).

    A round ends after each step whose number is a multiple of `every`, and after the last step.
    The inner optimizer's state is never exchanged.

    Args:
        every: steps per round, H in the papers.
        outer_lr, outer_momentum: settings of the outer SGD.
        pattern: a subclass's; None: LocalSync's own.

    Raises:
        ValueError: an argument out of range, or an exchange that does not average.
    """

    def __init__(
        self,
        parts: SyncParts,
        *,
        every: int,
        outer_lr: float,
        outer_momentum: float,
        pattern: Pattern | None = None,
    ) -> None:
        _check_ranges(every, outer_lr, outer_momentum)
        super().__init__(parts, pattern or local(every))
        weights = self.parameters.values()
        self.outer = torch.optim.SGD(
            weights,
            lr=outer_lr,
            momentum=outer_momentum,
            nesterov=outer_momentum > 0,
            fused=all(map(is_fusible, weights)),
        )
        self.anchor: dict[str, Tensor] = {}  # which the weights have left, if in_round

    def __enter__(self) -> Self:
        if not self.in_round:
            self.anchor = {name: p.detach().clone() for name, p in self.parameters.items()}
        return super().__enter__()

    def after_update(self, last: bool) -> Tensor | None:
        self.in_round = not last and (self.step + 1) % self.every != 0
        finite = None if self.in_round else self._end_round()
        self.step += 1
        return finite

    @torch.no_grad()
    def _end_round(self) -> Tensor | None:
        self._leave_changes(self.parameters)
        finite = self._average()
        self._move_anchor(self.parameters)
        return finite

    def _leave_changes(self, names: Iterable[str]) -> None:
        """Leave in `grad` of each parameter how far it has moved away from its anchor, negated."""
        for name in names:
            self.parameters[name].grad = self.anchor[name] - self.parameters[name]

    def _move_anchor(self, names: Iterable[str], own_share: float = 0.0) -> None:
        """Move anchors by the mean changes in `grad`; weights follow, but for a share of theirs."""
        weights: list[Tensor] = [self.parameters[name] for name in names]
        anchor = [self.anchor[name] for name in names]
        own = [weight.clone() for weight in weights] if own_share else []
        torch._foreach_copy_(weights, anchor)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
        self.outer.step()  # pyright: ignore[reportUnknownMemberType]
        self.outer.zero_grad()
        torch._foreach_copy_(anchor, weights)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
        if own:
            torch._foreach_lerp_(weights, own, own_share)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]

    def state_dict(self) -> SyncState:
        """Return the anchor, unless it equals the weights, and the outer momentum."""
        state = self.outer.state
        moved = {name: p for name, p in self.parameters.items() if p in state}
        momentum = {name: state[p]["momentum_buffer"] for name, p in moved.items()}
        anchor = self.anchor if self.in_round else {}
        return {**super().state_dict(), "anchor": anchor, "momentum": momentum}

    def load_state_dict(self, state: SyncState) -> None:
        super().load_state_dict(state)
        self.anchor = state.get("anchor", {})
        self.in_round = bool(self.anchor)
        for name, momentum in state.get("momentum", {}).items():
            self.outer.state[self.parameters[name]]["momentum_buffer"] = momentum


def _check_ranges(every: object, outer_lr: object, outer_momentum: object) -> None:
    if not is_whole(every) or every < 1:
        raise ValueError(f"sync.every={every}: must be an integer of at least 1")
    if not is_number(outer_lr) or not 0 < outer_lr < float("inf"):
        raise ValueError(f"sync.outer_lr={outer_lr}: must be a number above 0")
    if not is_number(outer_momentum) or not 0 <= outer_momentum < 1:
        raise ValueError(f"sync.outer_momentum={outer_momentum}: must be at least 0 and below 1")
