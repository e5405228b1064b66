"""check="first" among processes: in loops of one's own and in the trainer."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lab
from lab.record.run_directory import RunDirectory
from lab.record.schema import read_record
from tests.support.hosts import enter_network, has_own_network, own_network
from tests.support.ranks import CREW, Crew, Outcome, composed, execute, spawn

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


MISTAKES: dict[str, tuple[str, Callable[[], Any]]] = {
    "by_ddp Summed": ("summed, not averaged", lambda: by_ddp(f"{EXCHANGES}.Summed")),
    "by_sync Stale": ("stale buffer", lambda: by_sync(f"{EXCHANGES}.Stale")),
    "by_ddp other weights": (
        "different initial weights",
        lambda: by_ddp("onebit", then=shift_on_rank_1),
    ),
    "by_sync other weights": (
        "different initial weights",
        lambda: by_sync("onebit", then=shift_on_rank_1),
    ),
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


def lines_of_clean_loops(folder: Path) -> list[str]:
    """Train by either way, without a mistake."""
    dist.init_process_group("gloo")
    found = [
        by_ddp("onebit", file=folder / "ddp.json"),
        by_sync("powersgd", file=folder / "sync.json"),
    ]
    dist.destroy_process_group()
    return [certificate.line for certificate in found]


# Exceptions leave backward, after which these ranks do nothing else.
def test_each_mistake_in_a_loop_is_named_on_every_rank() -> None:
    first, *others = spawn(4, lines_of_mistakes)
    assert all(other == first for other in others)
    wrong = {
        name: first[name]
        for name, (fault, _) in MISTAKES.items()
        if not first[name].removeprefix("certificate: ").startswith(fault)
    }
    assert wrong == {}


def test_right_loops_have_a_certificate_and_a_file(tmp_path: Path) -> None:
    first, *_ = CREW.call(3, lines_of_clean_loops, tmp_path)
    for name, line in zip(("ddp", "sync"), first, strict=True):
        proven = "gradients averaged once over 3 of 3 ranks, for 6 of 6 parameters"
        assert line.startswith(f"certificate: weights equal on 3 ranks; {proven}")
        assert json.loads((tmp_path / f"{name}.json").read_text())["line"] == line


@pytest.mark.parametrize("strategy", ["ddp", "onebit"])
def test_a_run_records_its_certificate(strategy: str) -> None:
    settings = (f"strategy={strategy}", "steps=4", "batch_size=32", "accumulate=2", "cell=a")
    first, second = CREW.call(2, execute, *composed(*settings, "check=first"))
    assert first.code == 0
    found = first.record["certificate"]
    assert found == second.record["certificate"]
    assert (found["holds"], found["proven"], found["num_exchanges"]) == (True, 8, 3)
    directory = RunDirectory(Path("runs/default/a"))
    recorded = read_record(directory.record_path).certificate
    assert recorded and recorded.line == found["line"]
    assert json.loads((directory.path / "certificate.json").read_text()) == found


def test_a_run_with_a_fault_fails_and_its_record_says_why() -> None:
    fault = "exchange=tests.support.misaveraged.Summed"
    settings = ("strategy=overlap", fault, "steps=4", "check=first", "cell=bad")
    with pytest.raises(AssertionError, match="ended without an answer"):
        spawn(2, execute, *composed(*settings))
    record = read_record(Path("runs/default/bad/record.json"))
    line = "certificate: summed, not averaged: ranks 0, 1 hold 2x the mean in"
    assert record.status == "failed"
    assert f"CertificateError: {line}" in str(record.error)
    assert record.certificate and record.certificate.line.startswith(line)
    assert not record.certificate.holds


def on_network(network: int, *arguments: Any) -> Outcome:
    enter_network(network)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # the test's store is outside
    return execute(*arguments)


@pytest.mark.skipif(not has_own_network(), reason="needs root and iproute2")
def test_an_interface_that_nobody_else_uses_confirms_the_factor() -> None:
    crew = Crew()
    try:
        with own_network() as network:
            settings = composed("strategy=onebit", "steps=4", "check=first")
            first, _ = crew.call(2, on_network, network, *settings)
    finally:
        crew.dismiss()
    found = first.record["certificate"]
    assert found["counted_factor"] == pytest.approx(found["factor"], rel=0.15)
    assert f"(counted on lo: {found['counted_factor']:.1f}x)" in found["line"]
