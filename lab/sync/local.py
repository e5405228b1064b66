"""LocalSync: ranks train by themselves and exchange weights once every so many steps."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn

from lab.distributed.comm import Comm
from lab.distributed.worker import Worker
from lab.exchange.base import Exchange
from lab.sync.gradsync import GradSync


class LocalSync(GradSync):
    """Local SGD, with an outer optimizer (Douillard et al. 2023, "DiLoCo", algorithm 1).

    All ranks begin a round with the same weights, the anchor, and each takes `every` steps with its
    own gradients. Then `anchor - weights` is exchanged as GradSync exchanges gradients, and its
    mean is the gradient with which an outer SGD with Nesterov momentum moves the anchor. From there
    all begin the next round. With `outer_lr=1` and no outer momentum the anchor moves to the mean
    of the weights: local SGD (Stich 2019, algorithm 1; Lin et al. 2020).

    A round ends after each step whose number is a multiple of `every`, and after the run's last.
    The inner optimizer's momentum is never exchanged.

    Args:
        every: steps of a round, H in the papers.
        outer_lr, outer_momentum: of the outer SGD.
        precision: of the run.
        model, module, exchange, comm, worker, overlap, bucket_mb: see GradSync.

    Raises:
        ValueError: an argument out of range, or a setting that makes no sense here.
    """

    own_replicas = True

    def __init__(
        self,
        model: nn.Module,
        module: nn.Module,
        exchange: Exchange,
        comm: Comm,
        worker: Worker,
        *,
        every: int,
        outer_lr: float,
        outer_momentum: float,
        precision: str = "fp32",
        overlap: bool = False,
        bucket_mb: float | None = None,
    ) -> None:
        _check_ranges(every, outer_lr, outer_momentum)
        if overlap:
            raise ValueError("overlap=true: must be false; weights are exchanged after the update")
        if precision == "fp16":
            raise ValueError(
                "precision=fp16: each rank would skip other steps; allowed are fp32, bf16"
            )
        if not exchange.keeps_replicas_equal:
            name = type(exchange).__name__
            raise ValueError(f"exchange={name}: leaves the ranks apart; take one that averages")
        super().__init__(model, module, exchange, comm, worker, bucket_mb=bucket_mb)
        self.divides_loss = False  # ranks take steps with their own gradients
        self.every = every
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
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
        """Leave each rank its own gradient."""

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
        torch._foreach_copy_(weights, anchor)
        self.outer.step()
        self.outer.zero_grad()
        torch._foreach_copy_(anchor, weights)
        return finite

    def state_dict(self) -> dict[str, Any]:
        """The anchor, unless it is what the weights are, and the outer momentum."""
        state = self.outer.state
        momentum = {n: state[p]["momentum_buffer"] for n, p in self.parameters.items() if state}
        anchor = self.anchor if self.in_round else {}
        return {**super().state_dict(), "anchor": anchor, "momentum": momentum}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.anchor = state.get("anchor", {})
        self.in_round = bool(self.anchor)
        for name, momentum in state.get("momentum", {}).items():
            self.outer.state[self.parameters[name]]["momentum_buffer"] = momentum


def mean_state(states: list[Any]) -> Any:
    """`states` of several ranks in one: tensors averaged, by key; of all else, the first's."""
    first = states[0]
    if isinstance(first, dict):
        return {key: mean_state([state[key] for state in states]) for key in first}
    if isinstance(first, Tensor):
        return torch.empty_like(first).copy_(torch.stack(states).double().mean(dim=0))
    return first


def _check_ranges(every: int, outer_lr: float, outer_momentum: float) -> None:
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(f"sync.every={every}: must be an integer of at least 1")
    if not _is_number(outer_lr) or not 0 < outer_lr < float("inf"):
        raise ValueError(f"sync.outer_lr={outer_lr}: must be a number above 0")
    if not _is_number(outer_momentum) or not 0 <= outer_momentum < 1:
        raise ValueError(f"sync.outer_momentum={outer_momentum}: must be at least 0 and below 1")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
