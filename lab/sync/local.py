"""LocalSync: ranks train on their own, and average their weights every few steps."""

from __future__ import annotations

from typing import Self, TypeGuard

import torch
from torch import Tensor

from lab.sync.base import SyncParts, SyncState
from lab.sync.gradsync import GradSync
from lab.sync.pattern import local


class LocalSync(GradSync):
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

    Raises:
        ValueError: an argument out of range, or an exchange that does not average.
    """

    def __init__(
        self, parts: SyncParts, *, every: int, outer_lr: float, outer_momentum: float
    ) -> None:
        _check_ranges(every, outer_lr, outer_momentum)
        if not parts.exchange.keeps_replicas_equal:
            name = type(parts.exchange).__name__
            raise ValueError(f"exchange={name}: does not average; choose one that does")
        if parts.exchange.delivers != "mean":
            name = type(parts.exchange).__name__
            raise ValueError(
                f"exchange={name}: leaves a {parts.exchange.delivers}, no mean; sync=local "
                "averages changes of weights"
            )
        super().__init__(parts, local(every))
        self.divides_loss = False  # ranks take steps with their own gradients
        self.parameters = {name: p for name, p in parts.model.named_parameters() if p.requires_grad}
        self.outer = torch.optim.SGD(
            self.parameters.values(),
            lr=outer_lr,
            momentum=outer_momentum,
            nesterov=outer_momentum > 0,
            fused=True,
        )
        self.anchor: dict[str, Tensor] = {}
        self.in_round = False  # the weights have left the anchor

    @property
    def keeps_replicas_equal(self) -> bool:
        return not self.in_round

    def __enter__(self) -> Self:
        if not self.in_round:
            self.anchor = {name: p.detach().clone() for name, p in self.parameters.items()}
        return super().__enter__()

    def finish(self) -> None:
        """Leave each rank its own gradients."""

    def after_update(self, last: bool) -> Tensor | None:
        self.in_round = not last and (self.step + 1) % self.every != 0
        if self.in_round:
            self.step += 1
            return None
        return self._end_round()

    @torch.no_grad()
    def _end_round(self) -> Tensor | None:
        weights: list[Tensor] = [*self.parameters.values()]
        anchor = [*self.anchor.values()]
        for weight, start in zip(weights, anchor, strict=True):
            weight.grad = start - weight
        finite = super().finish()
        torch._foreach_copy_(weights, anchor)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
        self.outer.step()  # pyright: ignore[reportUnknownMemberType]
        self.outer.zero_grad()
        torch._foreach_copy_(anchor, weights)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
        return finite

    def state_dict(self) -> SyncState:
        """Return the anchor, unless it equals the weights, and the outer momentum."""
        state = self.outer.state
        momentum = {n: state[p]["momentum_buffer"] for n, p in self.parameters.items() if state}
        anchor = self.anchor if self.in_round else {}
        return {**super().state_dict(), "anchor": anchor, "momentum": momentum}

    def load_state_dict(self, state: SyncState) -> None:
        super().load_state_dict(state)
        self.anchor = state.get("anchor", {})
        self.in_round = bool(self.anchor)
        for name, momentum in state.get("momentum", {}).items():
            self.outer.state[self.parameters[name]]["momentum_buffer"] = momentum


def _check_ranges(every: object, outer_lr: object, outer_momentum: object) -> None:
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(f"sync.every={every}: must be an integer of at least 1")
    if not _is_number(outer_lr) or not 0 < outer_lr < float("inf"):
        raise ValueError(f"sync.outer_lr={outer_lr}: must be a number above 0")
    if not _is_number(outer_momentum) or not 0 <= outer_momentum < 1:
        raise ValueError(f"sync.outer_momentum={outer_momentum}: must be at least 0 and below 1")


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
