"""A non-finite gradient: all ranks find it one step late, and keep nothing of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lab.distributed import world as worlds
from lab.settings.config import load
from lab.training.assemble import assembled
from lab.training.checkpoint import state_of
from lab.training.trainer import Trainer
from tests.support.ranks import join, spawn
from tests.support.slow import some_of

# All cases run in one process for each rank.
pytestmark = pytest.mark.xdist_group("not finite")

RUN = ("data.size=16", "batch_size=24", "optim.lr=0.01", "steps=12", "bucket_mb=0.05")
BAD_STEP, BAD = 3, "classifier.3.weight"
NAMED = f"gradient not finite at step {BAD_STEP}, first in {BAD}; try a smaller optim.lr"
LATER = NAMED.replace("step 3", "step 4")
EVERYWHERE = "in all parameters"
LATE = ("strategy=priority", "sync.trials=0", "sync.chunk_mb=0.05")

Then = Callable[[Trainer], Any]  # called after the steps


def train_on(trainer: Trainer) -> None:
    raise AssertionError("steps went on to their end")


# Settings, number of steps before `Then`, and the failure's message.
CASES: dict[str, tuple[tuple[str, ...], int, Then, str]] = {
    "onebit": (("strategy=onebit",), 12, train_on, NAMED),
    # The value is not among the sent ones: no weight shows it.
    "randomk": (
        ("strategy=randomk", "exchange.ratio=0.05"),
        12,
        train_on,
        NAMED.replace(f", first in {BAD}", ""),
    ),
    "clipped": (("strategy=onebit", "clip_grad_norm=1"), 12, train_on, NAMED),
    "cntk": (("strategy=cntk",), 12, train_on, NAMED),
    # The mean of step 3 is applied in step 4.
    "double buffer": (("strategy=cntk", "sync.double_buffer=true"), 12, train_on, LATER),
    "evaluated, forward waits": (LATE, 4, Trainer.evaluate, NAMED),
    "saved, forward waits": (LATE, 4, state_of, NAMED),
    # An all-reduce does not check: the next step's loss shows it, with all gradients spoiled.
    "allreduce": (
        ("strategy=overlap",), 12, train_on, LATER.replace(f"first in {BAD}", EVERYWHERE)
    ),
    "evaluated": (("strategy=onebit",), 4, Trainer.evaluate, NAMED),
    "saved": (("strategy=onebit",), 4, state_of, NAMED),
    "saved, no exchange looked": (("strategy=overlap",), 4, state_of, NAMED),
    "saved, not applied yet": (
        ("strategy=cntk", "sync.double_buffer=true"), 4, state_of, NAMED
    ),
    "last step": (("strategy=onebit", "steps=4"), 12, train_on, NAMED),
    # Step 3's means are applied in step 4, and 1-bit SGD has looked by then.
    "forward waits": (
        (*LATE, "exchange=onebit"), 12, train_on, LATER.replace(f"first in {BAD}", EVERYWHERE)
    ),
}  # fmt: skip


def plant(trainer: Trainer) -> None:
    """Set one value of one gradient of rank 1 to NaN, in one step."""
    weight = dict(trainer.model.named_parameters())[BAD]

    def hook(parameter: nn.Parameter) -> None:
        if trainer.world.rank == 1 and trainer.progress.step == BAD_STEP:
            assert parameter.grad is not None
            parameter.grad.view(-1)[0] = torch.nan

    weight.register_post_accumulate_grad_hook(hook)


def failures() -> dict[str, tuple[str, int]]:
    """Return by case a rank's failure, and the number of steps before it."""
    world, found = join(), {}
    for name, (settings, num_steps, then, _) in CASES.items():
        with assembled(load(["device=cpu", *RUN, *settings]), world) as part:
            trainer = part.trainer
            plant(trainer)
            try:
                for step in trainer.steps():
                    if step == num_steps:
                        break
                then(trainer)
            except FloatingPointError as error:
                found[name] = str(error), trainer.progress.step
            part.worker.wait()  # for what a failed run would leave under way, and the next one meet
    worlds.stop()
    return found


@pytest.fixture(scope="module")
def found() -> list[dict[str, tuple[str, int]]]:
    return spawn(2, failures)


@pytest.mark.parametrize("case", some_of(CASES, every=3))
def test_all_ranks_name_step_and_parameter(
    case: str, found: list[dict[str, tuple[str, int]]]
) -> None:
    *_, message = CASES[case]
    num_steps = 5 if "step 4" in message else 4  # one more than the step that is named
    assert [of_rank[case] for of_rank in found] == [(message, num_steps)] * 2
