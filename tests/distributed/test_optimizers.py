"""AdamW, whose state counts steps: resumed, skipped, averaged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lab.training import checkpoint
from lab.training.checkpoint import replica_of
from tests.distributed.test_strategies import distance
from tests.support.ranks import Outcome, train

ADAMW = ("optim=adamw", "optim.schedule=linear", "optim.decay_vectors=false", "warmup_steps=1")
RUN = (*ADAMW, "data.size=16", "batch_size=24")
# More settings, so that ten steps end between two rounds, and a gradient is under way after five.
MORE = {"local_sgd": ("sync.every=3",), "cntk": ("sync.double_buffer=true",)}


def run(size: int, strategy: str, *settings: str) -> list[Outcome]:
    return train(size, f"strategy={strategy}", *RUN, *MORE.get(strategy, ()), *settings)


def part_at(step: int, rank: int) -> dict[str, Any]:
    """Return what all ranks or this one saved in a checkpoint of the cell `a`."""
    shared, owns = checkpoint.load(Path(f"runs/default/a/checkpoints/step_{step:06d}"))
    return {**shared, **owns[rank]}


def optimizer_at(step: int, rank: int) -> dict[str, Any]:
    """Return the optimizer's state in that checkpoint."""
    return part_at(step, rank)["optimizer"]


def states_at(step: int, rank: int) -> list[dict[str, Any]]:
    """Return the state of each parameter there, or of each slice of one."""
    part = part_at(step, rank)
    if "slices" in part:
        return [piece["state"] for piece in part["slices"].values()]
    return [*part["optimizer"]["state"].values()]


# DDP has other buckets after a resume, which on two ranks changes no sum.
@pytest.mark.parametrize("strategy", ["cntk", "ddp", "local_sgd", "zero1"])
def test_a_resumed_run_ends_in_the_same_bits(strategy: str) -> None:
    settings = ("steps=10", "checkpoint_every=5", "cell=a")
    whole = run(2, strategy, *settings)
    resume = "resume=runs/default/a/checkpoints/step_000005"
    resumed = run(2, strategy, "steps=10", resume)
    for one, other in zip(whole, resumed, strict=True):
        assert one.record["status"] == other.record["status"] == "done"
        assert all(torch.equal(one.weights[n], other.weights[n]) for n in one.weights)
    late = strategy == "cntk"  # its first step had no gradient to apply
    for state in states_at(10, rank=1):
        assert float(state["step"]) == 10 - late
        assert state["exp_avg_sq"].norm() > 0


def test_ranks_that_average_exactly_equal_one_process_on_the_whole_batch() -> None:
    # Adam divides by a gradient's own size, so eps must stand above rounding errors.
    ours, alone = (run(size, "allreduce", "steps=10", "optim.eps=1e-3") for size in (3, 1))
    assert distance(ours[0].weights, alone[0].weights) < 1e-6


def test_a_step_that_fp16_skips_is_not_counted_by_the_optimizer() -> None:
    fault = "exchange._target_=tests.support.faults.OneBitNanOnRank1"
    settings = ("precision=fp16", "steps=6", "checkpoint_every=6", "cell=a", fault)
    skipped = run(2, "onebit", *settings)[0].record["num_skipped_steps"]
    assert 0 < skipped < 6
    steps = {float(state["step"]) for state in optimizer_at(6, rank=0)["state"].values()}
    assert steps == {6.0 - skipped}


def test_ranks_with_states_of_their_own_go_on_from_their_mean() -> None:
    run(3, "local_sgd", "steps=5", "checkpoint_every=5", "cell=a")
    path = Path("runs/default/a/checkpoints/step_000005")
    shared, owns = checkpoint.load(path)
    merged = replica_of(None, 2, shared, owns)["optimizer"]["state"]
    for key, state in merged.items():
        each = torch.stack([own["optimizer"]["state"][key]["exp_avg"] for own in owns])
        assert not torch.equal(each[0], each[1])
        torch.testing.assert_close(state["exp_avg"], each.mean(dim=0))
        assert float(state["step"]) == 5
    assert run(2, "allreduce", "steps=8", f"resume={path}")[0].record["num_steps"] == 8


def test_a_users_own_optimizer_resumes_too() -> None:
    mine = "optim._target_=tests.support.optimizers.SignDescent"
    keys = [f"~optim.{key}" for key in ("betas", "eps")]
    whole = run(2, "onebit", mine, *keys, "steps=6", "checkpoint_every=3", "cell=a")
    resume = "resume=runs/default/a/checkpoints/step_000003"
    resumed = run(2, "onebit", mine, *keys, "steps=6", resume)
    assert whole[0].record["replica_hash"] == resumed[0].record["replica_hash"]
    groups = optimizer_at(6, rank=0)["param_groups"]
    assert [group["count"] for group in groups] == [6, 6]
