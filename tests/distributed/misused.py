"""Loops of a user's own, by DDP and by grad_sync, each with a mistake that check="first" names."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lab

STEPS, WIDTH = 4, 40
EXCHANGES = "tests.support.misaveraged"


class Net(nn.Module):
    """Three layers, of which `rare` is left out where a mistake says so."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.rare = nn.Linear(WIDTH, 90), nn.Linear(90, 90)
        self.last = nn.Linear(90, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.rare(self.first(inputs).tanh()).tanh())


def inputs(step: int) -> Tensor:
    chance = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(6, WIDTH, generator=chance)


def loss(module: nn.Module, step: int) -> Tensor:
    return (module(inputs(step)) - 1).square().mean()


def shift_on_rank_1(net: Net) -> None:
    if dist.get_rank() == 1:
        with torch.no_grad():
            net.rare.bias[3] += 1e-5


def train(
    module: nn.Module,
    early: Callable[[], AbstractContextManager[object]],
    late: Callable[[], AbstractContextManager[object]] = nullcontext,
    finish: Callable[[], object] = lambda: None,
) -> None:
    """Take steps of two micro-batches, of which `early` and `late` enclose forward and backward."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        with early():
            loss(module, 10 + step).backward()
        with late():
            loss(module, step).backward()
        finish()
        nn.utils.clip_grad_norm_(module.parameters(), 0.01)
        optimizer.step()


def by_ddp(
    strategy: str = "allreduce",
    *,
    frozen_at_first: bool = False,
    frozen_longer: bool = False,
    then: Callable[[Net], None] = lambda net: None,
    no_sync: bool = False,
    on_a_copy: bool = False,
    file: Path | None = None,
    **more: Any,
) -> Any:
    net = Net()
    net.rare.bias.requires_grad_(not (frozen_at_first or frozen_longer))
    ddp = DistributedDataParallel(net, **more)
    net.rare.bias.requires_grad_(not frozen_longer)
    arguments: dict[str, Any] = {"check": "first", "certificate": file}
    if on_a_copy:
        state, hook = lab.ddp_comm_hook(strategy, ddp, **arguments)
        DistributedDataParallel(copy.deepcopy(net)).register_comm_hook(state, hook)
    else:
        state = lab.attach(ddp, strategy, **arguments)
    net.rare.bias.requires_grad_(True)
    then(net)
    train(ddp, ddp.no_sync, ddp.no_sync if no_sync else nullcontext)
    return state.certificate


def by_sync(
    strategy: str = "allreduce",
    *,
    frozen: bool = False,
    then: Callable[[Net], None] = lambda net: None,
    forget: bool = False,
    copied: bool = False,
    file: Path | None = None,
) -> Any:
    net = Net()
    net.rare.bias.requires_grad_(not frozen)
    with lab.grad_sync(net, strategy, check="first", certificate=file) as sync:
        net.rare.bias.requires_grad_(True)
        then(net)
        finish = (lambda: None) if forget else sync.finish
        train(copy.deepcopy(net) if copied else net, sync.accumulate, finish=finish)
    return sync.certificate


Way = Callable[..., Any]
OF_EXCHANGES: tuple[tuple[str, Way, str], ...] = (
    ("summed, not averaged", by_ddp, "Summed"),
    ("divided twice", by_sync, "DividedTwice"),
    ("not exchanged", by_sync, "NotExchanged"),
    ("wrong group", by_ddp, "WrongGroup"),
    ("stale buffer", by_ddp, "Stale"),
)
CLEAN: tuple[tuple[Way, tuple[str, ...]], ...] = (
    (by_ddp, ("allreduce", "onebit", "int8", "powersgd")),
    (by_sync, ("allreduce", "onebit", "topk", "bf16")),
)
MISTAKES: dict[str, tuple[str, Callable[[], Any]]] = {
    **{
        f"{way.__name__} {exchange}": (fault, partial(way, f"{EXCHANGES}.{exchange}"))
        for fault, way, exchange in OF_EXCHANGES
    },
    **{
        f"{way.__name__} other weights": (
            "different initial weights",
            partial(way, "onebit", then=shift_on_rank_1),
        )
        for way, _ in CLEAN
    },
    "by_ddp frozen when DDP was made": ("left out", lambda: by_ddp(frozen_at_first=True)),
    "by_ddp frozen when attached": ("rare.bias: was frozen", lambda: by_ddp(frozen_longer=True)),
    "by_sync frozen at first": ("rare.bias: was frozen", lambda: by_sync("onebit", frozen=True)),
    "by_ddp hook on a copy": ("hook ignored", lambda: by_ddp(on_a_copy=True)),
    "by_ddp no_sync forgotten": ("hook ignored", lambda: by_ddp("onebit", no_sync=True)),
    "by_sync finish forgotten": ("not exchanged", lambda: by_sync(forget=True)),
    "by_sync a copy trains": ("hook ignored", lambda: by_sync(copied=True)),
}


def lines_of_mistakes() -> dict[str, str]:
    """Make all mistakes in turn, as one of several ranks; return what each was told."""
    dist.init_process_group("gloo")
    lines = {}
    for name, (_, make) in MISTAKES.items():
        try:
            certificate = make()
            lines[name] = f"no fault: {certificate and certificate.line}"
        except RuntimeError as error:  # of a CertificateError, or of the exchange itself
            lines[name] = str(error)
    dist.destroy_process_group()
    return lines


def lines_of_clean_loops(folder: Path) -> dict[str, str]:
    """Train by exchanges of all kinds, without a mistake."""
    dist.init_process_group("gloo")
    lines = {}
    for way, strategies in CLEAN:
        for strategy in strategies:
            name = f"{way.__name__} {strategy}"
            lines[name] = way(strategy, file=folder / f"{name}.json").line
    dist.destroy_process_group()
    return lines
