"""graph=true: captured steps repeat with the bits of steps that the host makes, on a mock GPU.

Exchanges run where they are submitted, in hooks within backward, as NCCL's do on a GPU, and codecs
are plain torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from lab.codec import build
from lab.data import GlobalSampler, TensorData
from lab.distributed import world as worlds
from lab.distributed.comm import Collective, Comm
from lab.distributed.worker import InlineWorker
from lab.distributed.world import World
from lab.exchange.allreduce import AllReduce
from lab.exchange.bucket import GradBucket
from lab.settings.config import ConfigError, load
from lab.training import assemble, graph
from lab.training.assemble import assembled
from lab.training.trainer import Trainer
from tests.support.cases import STRATEGIES
from tests.support.ranks import Outcome, composed, execute, join, spawn
from tests.support.refused import refusal_of
from tests.support.tape import Tape, TapeGraph, differences

# All cases run in one process for each rank.
pytestmark = pytest.mark.xdist_group("graph")

STEPS, STEPS_OF_DDP = 9, 14
NOTED = 6, 7
RUN = ("device=cpu", "graph=true", "data.size=16", "batch_size=24", "optim.lr=0.01")
MORE = ("optim.warmup_steps=4", "warmup_steps=2")


MORE_CASES = {
    "in place": ("strategy=overlap", "bucket_mb=0.05"),
    "clipped": ("strategy=onebit", "clip_grad_norm=1", "accumulate=2", "precision=bf16"),
    "warm-up": ("strategy=onebit", "exchange.warmup_steps=4"),
    "adamw": ("strategy=int8", "optim=adamw", "optim.decay_vectors=false"),
    "dropout": ("strategy=overlap", "model=alexnet_cifar", "optim.schedule=constant"),
    "channels last": ("strategy=overlap", "channels_last=true", "exchange=bf16"),
    "zero1, int8": ("strategy=zero1", "exchange=int8"),
}
BEGIN = {"ddp": 11, "warm-up": 5}  # other graphs begin at step 3
ALWAYS = ["onebit", "ddp", "in place", "adamw"]


def all_cases() -> dict[str, tuple[str, ...]]:
    taken = [name for name in STRATEGIES if not refusal_of(name)]
    return {name: (f"strategy={name}",) for name in taken} | MORE_CASES


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

    def noted(inputs: Tensor, targets: Tensor) -> Tensor:
        if trainer.progress.step not in NOTED:
            return train(inputs, targets)
        trainer.check_last_step()
        tapes.append(Tape())
        with tapes[-1].noting():
            return train(inputs, targets)

    trainer.train = noted
    return tapes


def finished(trainer: Trainer) -> dict[str, Tensor]:
    """Train to the end; return all that a step may change, and what the steps have sent."""
    for _ in trainer.steps():
        pass
    of_optimizer = trainer.optimizer.state_dict()["state"]
    kept = {**trainer.sync.exchange.state_dict(), **of_optimizer, "": trainer.model.state_dict()}
    found = {
        f"{kind} {name}": value.clone()
        for kind, each in kept.items()
        for name, value in each.items()
        if value is not None
    }
    losses, traffic = torch.tensor(trainer.losses.read), torch.tensor(trainer.traffic)
    return {**found, "losses": losses, "traffic": traffic}


def config_of(settings: tuple[str, ...]) -> DictConfig:
    """Compose a case's settings, once for all ranks."""
    steps = STEPS_OF_DDP if "strategy=ddp" in settings else STEPS
    return load([*RUN, *MORE, f"steps={steps}", *settings])


def compared(config: DictConfig, world: World) -> Compared:
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


def compared_cases(configs: dict[str, DictConfig]) -> dict[str, Compared]:
    world = join()
    with mock_gpu():
        found = {name: compared(config, world) for name, config in configs.items()}
    worlds.stop()
    return found


@pytest.fixture(scope="module", params=[False, pytest.param(True, marks=pytest.mark.slow)])
def cases(request: pytest.FixtureRequest) -> dict[str, Compared]:
    chosen = all_cases()
    if not request.param:
        chosen = {name: chosen[name] for name in ALWAYS}
    configs = {name: config_of(settings) for name, settings in chosen.items()}
    ranks = spawn(2, compared_cases, configs, timeout_s=900)
    assert ranks[0].keys() == ranks[1].keys() == chosen.keys()
    return ranks[0]


def test_two_steps_do_the_same_at_the_same_addresses(cases: dict[str, Compared]) -> None:
    assert {name: case.differ for name, case in cases.items() if case.differ} == {}


def test_replays_have_the_bits_of_steps_by_the_host(cases: dict[str, Compared]) -> None:
    assert {name: case.otherwise for name, case in cases.items() if case.otherwise} == {}
    begun = {name: case.captured_at for name, case in cases.items()}
    assert begun == {name: BEGIN.get(name, 3) for name in cases}


class Moving(AllReduce):
    """An all-reduce whose memory for messages moves from step to step."""

    def stages(self, bucket: GradBucket, comm: Comm) -> Iterator[Collective]:
        memory = bucket.plans.setdefault("turns", [bucket.flat.clone() for _ in "ab"])
        memory.reverse()
        memory[0].copy_(bucket.flat)
        yield comm.iall_reduce(memory[0])
        torch.div(memory[0], 1 if bucket.divided else comm.size, out=bucket.flat)


OTHERWISE = {
    "moving memory": ("exchange=tests.distributed.test_graph.Moving",),
    "places by the step": ("strategy=randomk",),
    "corrections by the step": ("strategy=onebit_adam",),
    "exchanges in some steps": ("strategy=local_sgd", "sync.every=2"),
}


def differences_of_others(configs: dict[str, DictConfig]) -> dict[str, list[str]]:
    world, found = join(), dict[str, list[str]]()
    with mock_gpu(), mock.patch.object(graph, "no_graph", lambda *_: ""):
        for name, config in configs.items():
            with assembled(config, world) as part:
                tapes = note_steps(part.trainer)
                finished(part.trainer)
            found[name] = differences(*tapes)
    worlds.stop()
    return found


def test_steps_that_are_no_graph_are_told_apart() -> None:
    configs = {name: config_of(settings) for name, settings in OTHERWISE.items()}
    found = spawn(2, differences_of_others, configs)[0]
    assert found.keys() == OTHERWISE.keys()
    assert all(found.values())
    assert "all" in found["moving memory"][0] or "copy" in found["moving memory"][0]


def run_on_mock_gpu(runs: list[tuple[list[str], DictConfig]]) -> list[Outcome]:
    with mock_gpu():
        return [execute(*run) for run in runs]


def test_a_run_is_recorded_evaluated_and_resumed_as_without_a_graph() -> None:
    fixed = ("optim.lr=0.0078125", "optim.schedule=constant", "optim.warmup_steps=0")
    more = ("model=mlp", "model.hidden=[64]", "steps=9", "eval_every=4", "checkpoint_every=5")
    resume = "resume=runs/default/whole/checkpoints/step_000005"
    runs = [
        composed(*RUN, *fixed, "strategy=onebit", *more, *each)
        for each in (("cell=whole",), ("graph=false",), ("cell=b", resume))
    ]
    whole, by_host, resumed = (each.record for each in spawn(2, run_on_mock_gpu, runs)[0])
    assert (whole["status"], whole["graph_from"]) == ("done", 3)
    assert whole["certificate"]["num_exchanges"] == 3
    assert whole["warmup"]["num_steps"] >= 4
    assert by_host["graph_from"] is None
    assert resumed["graph_from"] == 8
    hashes = {each["replica_hash"] for each in (whole, by_host, resumed)}
    assert len(hashes) == 1 and None not in hashes
    for key in ("payload_bytes_per_step", "messages_per_step", "final"):
        assert whole[key] == by_host[key]


def error_of(settings: tuple[str, ...], break_off: bool) -> tuple[int, str]:
    """Train alone, from batches of which the seventh is broken; return the step and the error.

    Args:
        break_off: it is shorter; else, its inputs are not finite.
    """
    batches = TensorData.train_batches

    def broken(data: TensorData, sampler: GlobalSampler) -> Iterator[tuple[Tensor, Tensor]]:
        for number, (inputs, targets) in enumerate(batches(data, sampler)):
            if number != 6:
                yield inputs, targets
            elif break_off:
                yield inputs[:, :, 1:], targets
            else:
                yield inputs * torch.nan, targets

    world = join()
    config = load([*RUN, f"steps={STEPS}", *settings])
    with mock_gpu(), mock.patch.object(TensorData, "train_batches", broken):
        parts = assemble.assemble(config, world, mock.MagicMock())
        try:
            finished(parts.trainer)
        except (FloatingPointError, ConfigError) as error:
            return parts.trainer.progress.step, str(error)
        finally:
            worlds.stop()
    return parts.trainer.progress.step, ""


def errors() -> list[tuple[int, str]]:
    cases = ((), False), ((), True), ((f"model={__name__}.Unused",), False)
    return [error_of(("strategy=onebit", *more), break_off) for more, break_off in cases]


class Unused(nn.Module):
    """A model with a layer that its loss does not reach."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(256, 10), nn.Linear(256, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.used(inputs.flatten(1))


def test_losses_batches_and_unused_parameters_are_refused_by_the_step_that_has_them() -> None:
    """A loss is read while the next step runs; an unused parameter found before a capture."""
    ((not_finite, another_shape, unused),) = spawn(1, errors)
    assert not_finite[0] == 7
    assert not_finite[1].startswith("gradient not finite at step 6")
    inputs = "inputs of step 6 are torch.float32 [24, 1, 15, 16], but"
    assert another_shape[1].startswith(f"graph=true: {inputs}")
    assert unused[0] == 3
    assert unused[1].startswith("graph=true: unused.") and "has no gradient on rank 0" in unused[1]
