"""The status of an error; runs in turns, which train as they would alone."""

from __future__ import annotations

import json
import math
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lab.distributed import world as worlds
from lab.distributed.worker import Watchdog
from lab.settings.command import EXIT_INTERRUPTED
from lab.settings.config import load
from lab.task.tasks import Classification
from lab.training import in_turns
from lab.training.assemble import assembled, join
from lab.training.run import TrainingRun, failure_of, start
from tests.support.ranks import CREW, train


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (KeyboardInterrupt(), "interrupted"),
        (torch.OutOfMemoryError("CUDA out of memory"), "oom"),
        (MemoryError(), "oom"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "oom"),
        (TimeoutError(), "timeout"),
        (RuntimeError("Timed out waiting 3000ms for recv operation to complete"), "timeout"),
        (dist.DistStoreError("wait timeout after 3000ms"), "timeout"),
        (ConnectionResetError(), "failed"),
        (ValueError("data.timeout=3: timed out"), "failed"),  # not a library's
        (FloatingPointError("loss not finite"), "failed"),
    ],
)
def test_status_of_an_error(error: BaseException, status: str) -> None:
    assert failure_of(error, 1).status == status


def test_a_stopped_run_has_its_record_before_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, goes_on = list[str | None](), iter([True, True, False])
    monkeypatch.setattr(Watchdog, "listen_to_signals", lambda _: None)
    monkeypatch.setattr(Watchdog, "begin_step", lambda _: next(goes_on))
    monkeypatch.setattr(TrainingRun, "save", lambda run, _: seen.append(run.directory.status()))
    words = [f"runs_dir={tmp_path}", "steps=5", "model=mlp", "model.hidden=[8]", "device=cpu"]
    assert start(load(words), words) == EXIT_INTERRUPTED
    assert seen == ["interrupted"]


class Mute(Exception):
    """An error that has no text."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_an_error_may_have_no_text_or_one_that_no_file_holds() -> None:
    assert failure_of(Mute(), 1).error == "rank 1: Mute: (its text cannot be read)"
    assert failure_of(ValueError("a\ud800"), 0).error == r"rank 0: ValueError: a\ud800"
    assert len(failure_of(ValueError("x" * 10**6), 0).error) < 11_000


def test_a_lost_rank_is_said_so() -> None:
    for error in (
        RuntimeError("\n[tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4711: \nmore"),
        RuntimeError("Connection reset"),
        ConnectionResetError("[Errno 104] Connection reset"),
    ):
        assert failure_of(error, 2).error.startswith("rank 2: lost another rank: ")
    wrong = failure_of(ValueError("peer=x: must be a number"), 0)
    assert wrong.error == "rank 0: ValueError: peer=x: must be a number"


def test_an_error_of_the_users_code_names_its_place_and_holds_the_traceback() -> None:
    def fails() -> None:
        raise IndexError("odd")

    with pytest.raises(IndexError) as caught:
        fails()
    failure = failure_of(caught.value, 3)
    assert re.fullmatch(r"rank 3: IndexError: odd \(test_run\.py:\d+ in fails\)", failure.error)
    assert failure.traceback and failure.traceback.endswith("IndexError: odd")
    assert failure_of(ValueError("odd"), 3).traceback is None


class Detached(nn.Linear):
    """Gives outputs without a gradient, or as `keeps` says, with one."""

    def __init__(self, input_shape: tuple[int, ...], output_size: int, keeps: bool) -> None:
        super().__init__(math.prod(input_shape), output_size)
        self.keeps = keeps

    def forward(self, input: Tensor) -> Tensor:
        outputs = super().forward(input.flatten(1))
        return outputs if self.keeps else outputs.detach()


def loss_as_a_number(outputs: Tensor, targets: Tensor) -> Tensor:
    return torch.tensor(float(outputs.square().mean()))


class Each(Classification):
    """Its loss is one number for each sample."""

    name = "each"
    loss = staticmethod(partial(cross_entropy, reduction="none"))


class Blind(Detached):
    """Gives no numbers when it is evaluated."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) if self.training else super().forward(input) * math.nan


def run_one_step(model: str, keeps: bool, *more: str) -> str:
    """Return the error of a run of one step, and its evaluation."""
    words = [f"model={__name__}.{model}", f"model.keeps={str(keeps).lower()}", "device=cpu", *more]
    config = load([*words, "data=synthetic", "data.num_images=8", "batch_size=4", "steps=1"])
    try:
        with assembled(config, join(config)) as parts, pytest.raises(Exception) as caught:
            next(parts.trainer.steps())
            parts.trainer.evaluate()
    finally:
        worlds.stop()
    return str(caught.value)


def test_a_gradient_that_is_lost_on_its_way_to_the_loss_is_named() -> None:
    (of_model,) = CREW.call(1, run_one_step, "Detached", False)
    assert of_model.startswith(f"model={__name__}.Detached: its output has no gradient")
    task = f"task={__name__}.loss_as_a_number"
    (of_task,) = CREW.call(1, run_one_step, "Detached", True, task)
    assert of_task.startswith(f"{task}: its loss has no gradient")


def test_a_loss_of_several_numbers_is_named() -> None:
    (error,) = CREW.call(1, run_one_step, "Detached", True, task := f"task={__name__}.Each")
    assert error.startswith(f"{task}: loss returns float32 [4]; it must return one number")


def test_an_optimizer_that_cannot_update_shards_is_named() -> None:
    rprop = ("strategy=fsdp", "optim=torch.optim.Rprop", "optim.lr=0.01")
    (error,) = CREW.call(1, run_one_step, "Detached", True, *rprop)
    assert error.startswith("strategy=fsdp: Rprop cannot update sharded weights (")
    assert "aten." in error


def test_an_evaluation_without_a_number_does_not_blame_gradients() -> None:
    (error,) = CREW.call(1, run_one_step, "Blind", True)
    assert error.startswith("test loss is nan after 1 steps, with finite weights; check the test")


RUN = (
    *("device=cpu", "model=alexnet_small", "model.hidden=64", "model.dropout=0.5"),
    *("data=synthetic", "data.num_images=64", "batch_size=4", "warmup_steps=1"),
)


def settings(folder: Path, cell: str, strategy: str, *more: str) -> list[str]:
    return [*RUN, f"strategy={strategy}", f"runs_dir={folder}", f"cell={cell}", *more]


def record(folder: Path, cell: str) -> dict[str, Any]:
    return json.loads((folder / "default" / cell / "record.json").read_text())


def test_weights_are_those_of_a_run_alone_with_the_same_random_numbers(tmp_path: Path) -> None:
    runs = {"onebit": "steps=5", "powersgd": "steps=7"}
    lists = [settings(tmp_path, f"turns-{name}", name, steps) for name, steps in runs.items()]
    assert CREW.call(1, in_turns.main, ["2", json.dumps(lists)]) == [0]
    for name, steps in runs.items():
        (alone,) = train(1, *settings(tmp_path, f"alone-{name}", name, steps))
        together = record(tmp_path, f"turns-{name}")
        assert together["replica_hash"] == alone.record["replica_hash"]
        assert len(together["turns_s"]) == 2
        assert together["num_timed_steps"] == 2
        assert together["peak_memory_bytes"] is None
    starts = {record(tmp_path, f"turns-{name}")["started_at"] for name in runs}
    assert len(starts) == 1


@pytest.mark.parametrize(
    ("size", "more", "line"),
    [
        ("2", ("steps=2",), "turns=2: strategy=onebit has steps=2, fewer than the warm-up"),
        ("1", ("steps=8",), "turns=1: strategy=onebit exchanges every 1 steps"),
    ],
)
def test_turns_that_do_not_fit_are_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], size: str, more: tuple[str, ...], line: str
) -> None:
    assert in_turns.main([size, json.dumps([settings(tmp_path, "a", "onebit", *more)])]) == 2
    assert f"lab.train: error: {line}" in capfd.readouterr().err
