"""What graph=true refuses, a line each; the list of it in docs/how-to/cuda_graph.md."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lab.settings.config import ConfigError, build, load
from lab.sync.base import Sync
from lab.sync.pattern import pattern_of
from lab.training import graph
from lab.training.assemble import Assembly
from lab.training.optim import Optim
from lab.training.trainer import LossScale, Progress
from tests.support import refused, refusing

LINES = {  # of REFUSALS the page has all
    "precision=fp16": "precision=fp16: the host decides whether to skip a step that overflowed; "
    "use precision=fp32 or bf16",
    "measure=breakdown": "measure=breakdown: ",
    "measure=noise": "measure=noise: ",
    "drift_every=5": "drift_every=N: ",
    "straggler=planted": "straggler=CHOICE: ",
    "model=replay": "model=replay: ",
    "strategy=randomk": "strategy=randomk: its operations depend on the step number, ",
    "strategy=local_sgd": "strategy=local_sgd: weights are exchanged in some steps only, ",
    "+optim.fused=false": "optim=torch.optim.SGD: must read its learning rate from the device; ",
    "optim=torch.optim.Adagrad": "optim=torch.optim.Adagrad: must read its learning rate from ",
    "steps=3": "steps=3: the first 3 steps run without a graph; set steps=4 or more",
}


def a_run(*settings: str, backend: str = "nccl") -> Any:
    """A trainer on a GPU, as far as rules look at it."""
    config = load(["graph=true", *settings])
    sync = SimpleNamespace(
        comm=SimpleNamespace(backend=backend),
        pattern=pattern_of(config),
        exchange=build(config.exchange),
        eager_steps=Sync.eager_steps,
    )
    optimizer = Optim(config.optim, 24, capturable=True).optimizer(nn.Linear(3, 2))
    return SimpleNamespace(
        config=config,
        sync=sync,
        loss_scale=LossScale() if config.precision == "fp16" else None,
        optimizer=optimizer,
        progress=Progress(total := config.steps or 20),
        total_steps=total,
    )


@pytest.mark.parametrize("setting", LINES)
def test_what_cannot_be_captured_is_refused_in_a_line(setting: str) -> None:
    with refusing(f"graph=true {LINES[setting]}"):
        graph.refuse(a_run(setting))


def test_a_cpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="graph=true device=cpu or backend=gloo: a CUDA graph"):
        graph.refuse(a_run(backend="gloo"))


@pytest.mark.parametrize(
    "settings",
    [
        ("strategy=onebit", "precision=bf16"),
        ("strategy=overlap", "accumulate=2", "clip_grad_norm=1"),
        ("strategy=ddp",),
        ("optim=adamw",),
        ("steps=4",),
    ],
)
def test_other_runs_are_taken(settings: tuple[str, ...]) -> None:
    graph.refuse(a_run(*settings))


@pytest.mark.xdist_group("compositions")
def test_the_page_lists_what_is_refused() -> None:
    assert refused.table() in refused.PAGE.read_text(), "python -m tests.support.refused writes it"


def test_a_rate_on_the_device_changes_in_place() -> None:
    config = load(["optim.lr=0.5", "optim.warmup_steps=4"])
    optim = Optim(config.optim, 24, capturable=True)
    optimizer = optim.optimizer(nn.Linear(3, 2))
    (group,) = optimizer.param_groups
    optim.prepare(optimizer, 0, 10)
    first = group["lr"]
    assert float(first) == 0.125
    optim.prepare(optimizer, 1, 10)
    assert group["lr"] is first and float(first) == 0.25


class Generator:
    """Of a GPU: it remembers which of its states it has."""

    def __init__(self, state: str = "before") -> None:
        self.state = state

    def clone_state(self) -> Generator:
        return Generator(self.state)

    def graphsafe_set_state(self, other: Generator) -> None:
        self.state = other.state


@pytest.mark.parametrize("cause", [RuntimeError("item() waits"), None])
def test_a_capture_that_fails_names_its_cause_and_leaves_random_numbers(
    cause: RuntimeError | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = Generator()

    @contextmanager
    def capturing(*_: Any, **__: Any) -> Iterator[None]:
        generator.state = "capturing"
        try:
            yield
        finally:
            raise RuntimeError("the capture was invalidated")

    def work() -> Tensor:
        if cause:
            raise cause
        return torch.zeros(())

    monkeypatch.setattr(torch.cuda, "CUDAGraph", SimpleNamespace)
    monkeypatch.setattr(torch.cuda, "graph", capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "default_generators", (None, generator))
    with pytest.raises(RuntimeError, match="waits" if cause else "invalidated"):
        graph.CudaGraph().capture(work)
    assert generator.state == "before"


def test_a_run_frees_its_graph_when_it_closes() -> None:
    closed = list[str]()
    parts: dict[str, Any] = {
        name: SimpleNamespace(close=partial(closed.append, name)) for name in ("worker", "graph")
    }
    trainer: Any = SimpleNamespace(graph=parts["graph"])
    Assembly(trainer, parts["worker"], {}).close()
    assert closed == ["worker", "graph"]


def test_runs_of_a_process_share_one_stream_which_is_not_the_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device, now, order = torch.device("cuda", 3), ["default"], list[str]()
    other = SimpleNamespace(wait_stream=order.append)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda _: "default")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: now[-1])
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: other)
    monkeypatch.setattr(torch.cuda, "set_stream", now.append)
    graph.leave_default_stream(torch.device("cpu"))
    assert now == ["default"]
    for _ in range(2):
        graph.leave_default_stream(device)
    assert now == ["default", other] and order == ["default"]
