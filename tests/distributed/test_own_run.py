"""lab.Run leaves the run directory that a run of lab.train leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lab
from lab.analysis.results import load
from lab.diagnosis import view
from lab.diagnosis.evidence import gather
from lab.record.recorders import CURVES
from lab.record.schema import Record, read_record
from tests.support.ranks import CREW

STEPS = 12


def record_loop(runs: Path, way: str, fails_at: tuple[int, int] | None = None) -> str:
    """Train for STEPS steps by lab.attach, by lab.grad_sync or ("ddp") without the lab."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    try:
        torch.manual_seed(rank)  # grad_sync broadcasts rank 0's weights
        model = nn.Linear(128, 4)
        wrapped: Any = model if way == "grad_sync" else DistributedDataParallel(model)
        small_blocks: dict[str, Any] = {"exchange.block_size": 64}
        sync: Any = {
            "attach": lambda: lab.attach(wrapped, "onebit"),
            "grad_sync": lambda: lab.grad_sync(model, "int8", **small_blocks),
            "ddp": lambda: None,
        }[way]()
        if way == "grad_sync":
            sync.__enter__()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with lab.Run(
            study="mine",
            model=wrapped,
            batch_size=16,
            strategy=None if sync else "ddp",
            sync=sync,
            settings={"lr": 0.01},
            runs_dir=runs,
            unit="row",
            recorder="csv",
        ) as run:
            for number in range(STEPS):
                with run.step() as step:
                    optimizer.zero_grad()
                    loss = wrapped(torch.randn(8, 128)).square().mean()
                    loss.backward()
                    step.loss = loss
                    if (number, rank) == fails_at:
                        raise ValueError("the data set has ended")
                    if way == "grad_sync":
                        sync.finish()
                    optimizer.step()
                if number % 5 == 4:
                    run.evaluated(loss=0.5 / (number + 1), accuracy=0.1 * number)
        return str(run.path)
    finally:
        dist.destroy_process_group()


def recorded(runs: Path, way: str) -> tuple[Path, Record]:
    first, second = CREW.call(2, record_loop, runs, way)
    assert first == second
    return Path(first), read_record(Path(first) / "record.json")


@pytest.mark.parametrize(("way", "strategy"), [("attach", "onebit"), ("grad_sync", "int8")])
def test_a_loop_of_ones_own_is_recorded_and_read_as_any_run(
    tmp_path: Path, way: str, strategy: str
) -> None:
    path, record = recorded(tmp_path, way)
    assert (record.status, record.num_steps, record.strategy) == ("done", STEPS, strategy)
    assert (record.model, record.unit, record.per_rank_batch_size) == ("Linear", "row", 8)
    assert record.num_parameters == 4 * 128 + 4
    assert record.variant == {"lr": "0.01"}
    assert record.replica_hash is not None  # so the ranks' weights were compared
    assert record.payload_bytes_per_step is not None and min(record.payload_bytes_per_step) > 0
    assert [each["step"] for each in record.evaluations] == [5, 10]
    assert record.final == pytest.approx({"loss": 0.05, "accuracy": 0.9})
    assert record.step_s is not None
    steps = pd.read_parquet(path / "steps.parquet")
    assert len(steps) == 2 * STEPS
    own = steps[steps["step"] > 1].filter(like="own_")
    assert own.notna().to_numpy().all()
    assert own.drop(columns="own_between_s").gt(0).to_numpy().all()
    assert steps.loss.between(0.01, 10).all() and steps.step_s.gt(0).all()
    curves, of_rank_0 = pd.read_csv(path / CURVES), steps[steps["rank"] == 0]
    assert curves["train/loss"].tolist() == pytest.approx(of_rank_0["loss"].tolist())
    assert curves["train/payload_bytes"].gt(0).to_numpy().all()
    assert curves["test/accuracy"].dropna().tolist() == pytest.approx([0.4, 0.9])

    results = load(tmp_path / "mine")
    evidence = gather(results, results.study.cells[0])
    assert evidence.pattern.takes_any_exchange
    assert evidence.pattern.waits_in_backward == (way == "attach")
    text = view.in_full(evidence, [])
    assert "the same loop on 1 and 2 ranks: lab.Run(study='mine', strategy='none', …)" in text
    assert "lab.sweep" not in text


def test_what_the_lab_does_not_know_is_null(tmp_path: Path) -> None:
    path, record = recorded(tmp_path, "ddp")
    assert record.payload_bytes_per_step is None and record.messages_per_step is None
    assert record.replica_hash is None
    steps = pd.read_parquet(path / "steps.parquet").query("step > 1")
    assert (steps["own_backward_s"] > 0).to_numpy().all()  # DDP waits after the last gradient
    assert steps["own_exchange_s"].isna().to_numpy().all()
    assert record.settings["sync._target_"].endswith("DDPSync")
    assert path.name == "ddp-n2-b16-lr_0.01"


@pytest.mark.parametrize("fails_at", [(7, 0), (7, 1)])
def test_the_rank_that_fails_first_says_why(tmp_path: Path, fails_at: tuple[int, int]) -> None:
    with pytest.raises(AssertionError, match="data set has ended|losed by peer|reset"):
        CREW.call(2, record_loop, tmp_path, "attach", fails_at)
    record = read_record(tmp_path / "mine/onebit-n2-b16-lr_0.01/record.json")
    assert record.status == "failed"
    line = f"rank {fails_at[1]}: ValueError: the data set has ended (test_own_run.py:"
    assert record.error and record.error.startswith(line)
    assert record.num_steps == 7


def wrong_settings() -> list[str]:
    """Collect refusals; a single rank needs no launcher and no process group of its own."""
    messages = []
    for wrong in (
        {"strategy": None},
        {"strategy": "ddp", "batch_size": 0},
        {"strategy": "my way", "scaling": "both"},
        {"strategy": "ddp", "study": "a/b"},
        {"strategy": "ddp", "settings": {"overlap": True}},
        {"strategy": "ddp", "settings": {"of": object()}},
    ):
        with pytest.raises(lab.ConfigError) as caught:
            lab.Run(**{"study": "mine", "model": "mine", "batch_size": 8, **wrong})
        messages.append(str(caught.value))
    dist.destroy_process_group()
    return messages


def test_wrong_settings_are_one_line() -> None:
    (messages,) = CREW.call(1, wrong_settings)
    assert messages == [
        "strategy=None: name a strategy or an exchange, or pass sync=",
        "batch_size=0: must be an integer from 1 to 2147483648",
        "scaling=both: allowed: strong, weak",
        "study='a/b': must be able to name a directory: use only letters, digits and "
        ". , = + _ - (but no dot at the start), at most 255 bytes, and no secret",
        "settings: overlap is a name that the lab uses; choose another",
        "settings: must map names to numbers, strings, or lists and dicts of them: Value 'object' "
        "is not a supported primitive type",
    ]


def not_apart(runs: Path) -> str:
    dist.init_process_group("gloo")
    ddp = DistributedDataParallel(nn.Linear(2, 2))
    with pytest.raises(lab.ConfigError) as caught:
        lab.Run(study="mine", model=ddp, strategy="none", batch_size=8, runs_dir=runs)
    dist.destroy_process_group()
    return str(caught.value)


def test_what_others_are_compared_to_may_exchange_nothing(tmp_path: Path) -> None:
    for message in CREW.call(2, not_apart, tmp_path):
        assert message.startswith("strategy=none: DistributedDataParallel exchanges gradients")


def odd_numbers(runs: Path) -> dict[str, float | None]:
    dist.init_process_group("gloo")

    def run() -> lab.Run:
        return lab.Run(study="mine", model="mine", strategy="ddp", batch_size=8, runs_dir=runs)

    refused = pytest.raises(ValueError, match=r"step\.loss: has shape \[3\]; must be one number")
    with refused, run() as failing, failing.step() as step:
        step.loss = torch.ones(3)
    with run() as right:
        with right.step() as step:
            step.loss = torch.ones(1)
        with pytest.raises(ValueError, match=r"evaluated\(accuracy=None\): must be one number"):
            right.evaluated(loss=0.5, accuracy=None)  # type: ignore[arg-type]
        half: Any = torch.tensor(0.5)
        right.evaluated(loss=half, accuracy=half)
    dist.destroy_process_group()
    assert read_record(failing.path / "record.json").status == "failed"
    return read_record(right.path / "record.json").final


def test_numbers_may_be_tensors_of_one_value(tmp_path: Path) -> None:
    assert CREW.call(1, odd_numbers, tmp_path) == [{"loss": 0.5, "accuracy": 0.5}]


def misused_steps(runs: Path) -> int | None:
    dist.init_process_group("gloo")
    run = lab.Run(study="mine", model="mine", strategy="ddp", batch_size=8, runs_dir=runs)
    outside = pytest.raises(RuntimeError, match=r"no run is open; call it inside `with lab\.Run")
    with outside, run.step():
        pass
    with run:
        for _ in range(3):
            with run.step(), pytest.raises(RuntimeError, match="inside another step"), run.step():
                pass
    with outside, run.step():
        pass
    dist.destroy_process_group()
    return read_record(run.path / "record.json").num_steps


def test_a_step_counts_within_its_run_and_once(tmp_path: Path) -> None:
    assert CREW.call(1, misused_steps, tmp_path) == [3]


def of_unlike_length(runs: Path) -> tuple[str, str]:
    """Take a step more on rank 1; return the error, and the run's status."""
    dist.init_process_group("gloo")
    try:
        run = lab.Run(study="x", strategy="none", model="m", batch_size=2, runs_dir=runs)
        with pytest.raises(ValueError, match="number of steps") as caught, run:
            for _ in range(3 + dist.get_rank()):
                with run.step():
                    pass
        return str(caught.value), run.record.status
    finally:
        dist.destroy_process_group()


def test_ranks_that_take_unlike_numbers_of_steps_are_named(tmp_path: Path) -> None:
    line = "run.step(): number of steps: 3 on rank 0, 4 on rank 1; must be equal on all ranks"
    assert CREW.call(2, of_unlike_length, tmp_path) == [(line, "failed")] * 2
