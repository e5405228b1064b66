"""graph=true: captured steps repeat with the bits of steps that the host makes, on a mock GPU.

Exchanges run where they are submitted, in hooks within backward, as NCCL's do on a GPU, and codecs
are plain torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from lab.codec import build
from lab.distributed import world as worlds
from lab.distributed.worker import InlineWorker
from lab.distributed.world import World
from lab.settings.config import build as built
from lab.settings.config import load
from lab.sync.pattern import pattern_of
from lab.training import assemble, graph
from lab.training.assemble import assembled
from lab.training.trainer import Trainer
from tests.support.cases import STRATEGIES
from tests.support.ranks import join, spawn
from tests.support.tape import Tape, TapeGraph, differences

# All cases run in one process for each rank.
pytestmark = pytest.mark.xdist_group("graph")

STEPS, STEPS_OF_DDP = 9, 14
NOTED = 4, 5
RUN = ("device=cpu", "graph=true", "data.size=16", "batch_size=24", "optim.lr=0.01")
MORE = ("optim.warmup_steps=4", "warmup_steps=2")


def refusal(strategy: str) -> str:
    config = load([f"strategy={strategy}"])
    return graph.no_graph(pattern_of(config), built(config.exchange))


TAKEN = [name for name in STRATEGIES if not refusal(name)]
CASES = {name: (f"strategy={name}",) for name in TAKEN} | {
    "in place": ("strategy=overlap", "bucket_mb=0.05"),
    "clipped": ("strategy=onebit", "clip_grad_norm=1", "accumulate=2", "precision=bf16"),
    "warm-up": ("strategy=onebit", "exchange.warmup_steps=4"),
    "adamw": ("strategy=int8", "optim=adamw", "optim.decay_vectors=false"),
    "dropout": ("strategy=overlap", "model=alexnet_cifar", "optim.schedule=constant"),
    "channels last": ("strategy=overlap", "channels_last=true", "exchange=bf16"),
    "ddp in half": ("strategy=ddp", "sync.hook=fp16"),
    "zero1, int8": ("strategy=zero1", "exchange=int8"),
}
ALWAYS = ["onebit", "ddp", "in place", "adamw"]


@dataclass
class Compared:
    """A case: how two steps of the host differ; where a graph began; what it did otherwise."""

    differ: list[str]
    captured_at: int | None
    otherwise: list[str]


@contextmanager
def mock_gpu() -> Iterator[None]:
    """Let a CPU be a device that captures."""
    rules = [rule for rule in graph.REFUSALS if "device" not in rule.settings]
    with (
        mock.patch.object(assemble, "make_worker", lambda *_, **__: InlineWorker()),
        mock.patch.object(build, "load", lambda *_: None),
        mock.patch.multiple(graph, CudaGraph=TapeGraph, REFUSALS=rules),
    ):
        yield


def note_steps(trainer: Trainer) -> list[Tape]:
    """Let the trainer make all steps by the host, and note what two of them do."""
    assert trainer.graph
    trainer.graph._is_steady = lambda: False
    train, tapes = trainer.train, list[Tape]()

    def noted(*batch: Tensor) -> Tensor:
        if trainer.progress.step not in NOTED:
            return train(*batch)
        trainer.check_last_step()
        tapes.append(Tape())
        with tapes[-1].noting():
            return train(*batch)

    trainer.train = noted
    return tapes


def finished(trainer: Trainer) -> dict[str, Any]:
    """Train to the end; return all that a step may change, and what the steps have sent."""
    for _ in trainer.steps():
        pass
    kept = trainer.sync.exchange.state_dict()
    state = trainer.optimizer.state_dict()["state"]
    return {
        **{f"weight {n}": t.clone() for n, t in trainer.model.state_dict().items()},
        **{f"{kind} {n}": t.clone() for kind, each in kept.items() for n, t in each.items()},
        **{
            f"{k} {n}": v.clone()
            for n, each in state.items()
            for k, v in each.items()
            if v is not None
        },
        "losses": torch.tensor(trainer.losses.read),
        "traffic": torch.tensor(trainer.traffic),
    }


def compared(settings: tuple[str, ...], world: World) -> Compared:
    steps = STEPS_OF_DDP if "strategy=ddp" in settings else STEPS
    config = load([*RUN, *MORE, f"steps={steps}", *settings])
    with assembled(config, world) as part:
        tapes = note_steps(part.trainer)
        by_host = finished(part.trainer)
    with assembled(config, world) as part:
        assert part.trainer.graph
        replayed = finished(part.trainer)
        captured_at = part.trainer.graph.captured_at
    assert by_host.keys() == replayed.keys()
    otherwise = [name for name, value in by_host.items() if not torch.equal(value, replayed[name])]
    return Compared(differences(*tapes), captured_at, otherwise)


def compared_cases(names: set[str]) -> dict[str, Compared]:
    world = join()
    with mock_gpu():
        found = {name: compared(CASES[name], world) for name in sorted(names)}
    worlds.stop()
    return found


@pytest.fixture(scope="module", params=[False, pytest.param(True, marks=pytest.mark.slow)])
def cases(request: pytest.FixtureRequest) -> dict[str, Compared]:
    ranks = spawn(2, compared_cases, {*CASES} if request.param else {*ALWAYS}, timeout_s=500)
    assert all(set(each) == set(ranks[0]) for each in ranks)
    return ranks[0]


def test_two_steps_do_the_same_at_the_same_addresses(cases: dict[str, Compared]) -> None:
    assert {name: case.differ for name, case in cases.items() if case.differ} == {}


def test_replays_have_the_bits_of_steps_by_the_host(cases: dict[str, Compared]) -> None:
    assert {name: case.otherwise for name, case in cases.items() if case.otherwise} == {}
    begun = {name: case.captured_at for name, case in cases.items()}
    assert begun == {
        **dict.fromkeys(cases, 3),
        **{n: 11 for n in cases if "ddp" in n},
        **{n: 5 for n in cases if n == "warm-up"},
    }
