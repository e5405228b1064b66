"""Training loops of the zoo. Each is written once, against what a loop of a user's own has."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.models import RANDOM, Model, loss_of

STEPS = 5
Named = dict[str, Tensor | None]  # gradients by parameter


class Handle:
    """A model whose gradients are averaged, as a loop sees it.

    Attributes:
        net: the user's model.
        module: runs forward: the model, or DDP's wrapper of it.
        delivered: what each exchange has left in `grad`, divided by the scale of the loss.
        follow: the gradients to go on with after each exchange, in the place of those delivered.
    """

    def __init__(self, net: nn.Module, scaler: torch.amp.GradScaler | None) -> None:
        self.net, self.scaler = net, scaler
        self.module: Callable[..., Tensor] = net
        self.delivered: list[Named] = []
        self.follow: list[Named] | None = None

    def accumulate(self) -> AbstractContextManager[Any]:
        """Enclose a micro-batch that is not its step's last."""
        return nullcontext()

    def finish(self) -> None:
        """Average the gradients, after a step's last backward."""
        self.exchange()
        scale = self.scale
        found = gradients(self.net)
        self.delivered.append({n: None if g is None else g / scale for n, g in found.items()})
        if self.follow is None:
            return
        due = self.follow[len(self.delivered) - 1]
        for name, parameter in self.net.named_parameters():
            gradient = due[name]
            if gradient is None or parameter.grad is None:
                parameter.grad = None if gradient is None else torch.empty_like(parameter)
            if gradient is not None and parameter.grad is not None:
                parameter.grad = parameter.grad.to_dense().copy_(gradient * scale)

    @property
    def scale(self) -> float:
        """The scale of the loss."""
        return self.scaler.get_scale() if self.scaler else 1.0

    def exchange(self) -> None:
        """Leave the mean in `grad`."""

    def state_dict(self) -> Any:
        """Return what the exchange keeps."""
        return {}

    def load_state_dict(self, state: Any) -> None:
        """Continue from `state_dict`."""

    def close(self) -> None:
        """End."""


class Run(ABC):
    """One rank of a loop.

    Attributes:
        handles: opened so far; one that continues another has its place.
        extras: more tensors that must be right at the end.
    """

    def __init__(self, model: Model, rank: int, size: int) -> None:
        self.model, self.rank, self.size = model, rank, size
        self.handles: list[Handle] = []
        self.extras: dict[str, Tensor] = {}

    def make(self, number: int = 0) -> nn.Module:
        """Build a model, with initial weights of this rank's own."""
        with RANDOM:
            torch.manual_seed(1000 * number + self.rank)
            return self.model.make()

    def open(
        self,
        net: nn.Module,
        scaler: torch.amp.GradScaler | None = None,
        continues: Handle | None = None,
    ) -> Handle:
        """Let the entrance under test have a model."""
        place = self.handles.index(continues) if continues else len(self.handles)
        handle = self.enter(net, scaler, place)
        if continues:
            handle.delivered = continues.delivered
        self.handles[place : place + 1] = [handle]
        return handle

    @abstractmethod
    def enter(self, net: nn.Module, scaler: Any, place: int) -> Handle:
        """Make the handle of a model, the one at `place`."""

    def loss(self, handle: Handle, step: int, micro: int = 0, which: tuple[Any, ...] = ()) -> Tensor:
        """Return the loss of this rank's batch.

        Args:
            which: more arguments of forward, before the batch.
        """
        return loss_of(handle.module(*which, *self.batch(step, micro)))

    def batch(self, step: int, micro: int = 0) -> tuple[Any, ...]:
        """Return a batch of this rank's own."""
        chance = torch.Generator().manual_seed(10_000 * self.rank + 100 * step + micro)
        return self.model.batch(chance, self.rank)

    def sgd(self, parameters: Any) -> torch.optim.Optimizer:
        """Return the optimizer of most loops."""
        kept = {"momentum": 0.9, "weight_decay": 0.01} if self.model.decay else {}
        return torch.optim.SGD(parameters, lr=0.05, **kept)


@dataclass(frozen=True)
class Loop:
    """A loop of the zoo.

    Attributes:
        train: runs it on one rank.
        unusual_at: exchanges before the one in which it first does what others do not: a refusal
            may come as late.
        refused: when a refusal is right; see Model.
        ddp: plain DistributedDataParallel can run it.
        sums: what is delivered and kept adds up.
    """

    train: Callable[[Run], None]
    unusual_at: int = 0
    refused: str = ""
    ddp: bool = True
    sums: bool = True


LOOPS: dict[str, Loop] = {}


class DoesNotApply(Exception):
    """A loop that makes no sense with this model."""


def gradients(net: nn.Module) -> Named:
    """Return copies of all gradients, by parameter."""
    named = net.named_parameters()
    return {n: None if p.grad is None else p.grad.detach().to_dense().clone() for n, p in named}


def loop(**facts: Any) -> Callable[[Callable[[Run], None]], Callable[[Run], None]]:
    """Add a loop under its name."""

    def add(train: Callable[[Run], None]) -> Callable[[Run], None]:
        LOOPS[train.__name__] = Loop(train, **facts)
        return train

    return add


@loop()
def plain(run: Run) -> None:
    handle = run.open(run.make())
    optimizer = run.sgd(handle.net.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        run.loss(handle, step).backward()
        handle.finish()
        optimizer.step()
