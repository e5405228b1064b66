"""Models of the zoo: each small, with its own inputs, and each unusual in one way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, rnn
from torch.utils.checkpoint import checkpoint

ROWS = 4
Batch = Callable[[torch.Generator, int], tuple[Any, ...]]  # called with a source of chance and a rank
RANDOM = threading.RLock()  # torch's own source of random numbers is one for all threads


def loss_of(outputs: Tensor) -> Tensor:
    """Return a loss of outputs of any dtype, real and in float32 at least."""
    real = torch.view_as_real(outputs) if outputs.is_complex() else outputs
    wide = real.float() if real.dtype in (torch.bfloat16, torch.float16) else real
    return (wide - 0.3).square().mean()


def draw(chance: torch.Generator, *shape: int) -> Tensor:
    """Return values of a normal distribution: the same whatever torch's default dtype is."""
    return torch.randn(*shape, generator=chance, dtype=torch.float32)


def normal(*shape: int) -> Batch:
    """Return inputs [ROWS, *shape]."""
    return lambda chance, _: (draw(chance, ROWS, *shape),)


def with_rank(*shape: int) -> Batch:
    """Return the same, and the rank."""
    return lambda chance, rank: (draw(chance, ROWS, *shape), rank)


def tokens(vocabulary: int, length: int) -> Batch:
    """Return token ids, [ROWS, length]."""
    return lambda chance, _: (torch.randint(vocabulary, (ROWS, length), generator=chance),)


@dataclass(frozen=True, eq=False)
class Model:
    """A model of the zoo.

    Attributes:
        make: builds it.
        batch: makes the arguments of its forward.
        wide: it also runs in float64, by torch's default dtype.
        refused: when a refusal is right: "always", or words of "compressed" (by exchanges that do
            more than add), "direction", "attach" (by DDP's hook) and "overlap"; empty: never.
        decay: optimizers may use momentum and weight decay.
        ddp: arguments of DistributedDataParallel.
        slow: for the whole product alone.
    """

    make: Callable[[], nn.Module]
    batch: Batch
    wide: bool = True
    refused: str = ""
    decay: bool = True
    ddp: dict[str, Any] = field(default_factory=lambda: {"find_unused_parameters": True})
    slow: bool = False


MODELS: dict[str, Model] = {}
STATIC: dict[str, Any] = {"static_graph": True}  # DDP takes several growths of a gradient so alone


def animal(batch: Batch, **facts: Any) -> Callable[[Callable[[], nn.Module]], Any]:
    """Add a class or function that builds a model, under its name."""

    def add(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        MODELS[make.__name__.lower()] = Model(make, batch, **facts)
        return make

    return add


@animal(normal(70))
def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(70, 96), nn.Tanh(), nn.Linear(96, 5))


@animal(normal(3, 8, 8))
def images() -> nn.Module:
    head = nn.Flatten(), nn.Linear(8 * 16, 5)
    return nn.Sequential(
        *(nn.Conv2d(3, 12, 3), nn.BatchNorm2d(12), nn.ReLU(), nn.Conv2d(12, 8, 3), nn.ReLU()), *head
    )


@animal(normal(70))
class UnusedHead(nn.Module):
    """A head that no loss reaches, and a layer that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.other = nn.Linear(70, 66), nn.Linear(66, 5), nn.Linear(66, 70)
        self.frozen = nn.Linear(70, 70).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(self.frozen(x))))


@animal(with_rank(64))
class Experts(nn.Module):
    """A mixture in which each rank uses an expert of its own, and one expert nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(64, 64)
        self.experts = nn.ModuleList(nn.Linear(64, 72) for _ in range(6))

    def forward(self, x: Tensor, rank: int) -> Tensor:
        hidden = torch.tanh(self.gate(x))
        return self.experts[rank](hidden) + self.experts[4](hidden)


class Slice(nn.Module):
    """A weight that is a part of a larger tensor, [n, m]."""

    def __init__(self, part: Callable[[Tensor], Tensor], n: int, m: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(part(torch.randn(2 * n, 2 * m) / n**0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def _with_slice(part: Callable[[Tensor], Tensor]) -> nn.Module:
    return nn.Sequential(nn.Linear(70, 64), nn.ReLU(), Slice(part, 64, 32), nn.Linear(32, 5))


@animal(normal(70))
def columns() -> nn.Module:
    return _with_slice(lambda whole: whole[:64, 32:])
