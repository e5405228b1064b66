"""Checkpoints: the same bits at the same number of ranks, the same sums at another."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from lab.record.schema import read_record
from lab.settings.config import build, load
from lab.training import checkpoint
from lab.training.recording import summary
from lab.web.contents import contents_of
from tests.distributed.test_strategies import RUN, undisturbed
from tests.support.cases import (
    BETWEEN_NODES,
    BY_THE_CLOCK,
    DIRECTIONS,
    OVER_TIME,
    RESUMED,
    STRATEGIES,
    keeps_replicas_equal,
)
from tests.support.ranks import Outcome, train
from tests.support.slow import some_of

SMALL = ("data.size=16", "batch_size=24", "optim.lr=0.01", "warmup_steps=1")

# Some may have dropped their residuals, or keep a frozen variance as another kind; others have none
# where all ranks are on one node, or (zeropp) switch them off.
MAY_HAVE_NONE = (*BY_THE_CLOCK, *OVER_TIME, *BETWEEN_NODES, *DIRECTIONS, "zeropp")
AT_STEP_5 = Path("runs/default/a/checkpoints/step_000005")


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# On four ranks those whose sums, residuals or weights could be mixed up between ranks. DDP has
# other buckets after a resume, so it equals itself only up to rounding.
CASES = [
    pytest.param(s, 2, marks=pytest.mark.xdist_group(f"strategy {s}"))  # shares its first run
    for s in STRATEGIES
]
CASES += [pytest.param(s, 4) for s in ("allreduce", "layerwise", "onebit", "powersgd", "local_sgd")]


@pytest.mark.parametrize(("strategy", "size"), some_of(CASES, every=6))
def test_resumed_run_ends_in_the_same_bits(
    strategy: str, size: int, shared: Path, tmp_path: Path
) -> None:
    more = RESUMED.get(strategy, ())
    cell = "cell=b" if more else "cell=a"  # test_strategies.py has the cell without more settings
    settings = f"strategy={strategy}", *more, *RUN
    whole = undisturbed(size, strategy, shared, *more, cell)
    run = shared / f"{strategy}-{size}" / "default" / cell.removeprefix("cell=")
    resume = f"resume={run}/checkpoints/step_000007"
    resumed = train(size, *settings, resume)
    if not keeps_replicas_equal(strategy):  # a checkpoint holds rank 0's weights
        whole, resumed = whole[:1], resumed[:1]
    for one, other in zip(whole, resumed, strict=True):
        assert same(one.weights, other.weights)
        for kind, residuals in one.exchange_state.items():
            assert residuals or strategy in MAY_HAVE_NONE
            assert same(residuals, other.exchange_state[kind])
    has_state = bool(build(load([f"strategy={strategy}"]).exchange).state_dict())
    assert has_state == bool(whole[0].exchange_state)


def sum_of_residuals(states: list[dict[str, dict[str, Tensor]]]) -> dict[str, Tensor]:
    """Add up what all ranks keep of each parameter: of their gradients, and of sums they own."""
    total = {name: torch.zeros(v.numel()).double() for name, v in states[0]["residual"].items()}
    for state in states:
        for name, values in state["residual"].items():
            total[name] += values.view(-1)
        for name, values in state["owner"].items():
            start = int(state["owner_start"][name])
            total[name][start : start + len(values)] += values
    return total


def test_residuals_keep_their_sum_at_another_number_of_ranks() -> None:
    settings = ("strategy=onebit", *SMALL)
    train(4, *settings, "steps=5", "checkpoint_every=5", "cell=a")
    before = sum_of_residuals([own["exchange"] for own in checkpoint.load(AT_STEP_5)[1]])
    assert all(total.norm() > 0 for total in before.values())

    def resumed(size: int, steps: int) -> list[Outcome]:
        return train(size, *settings, f"steps={steps}", f"resume={AT_STEP_5}")

    for size in (2, 3):
        after = sum_of_residuals([outcome.exchange_state for outcome in resumed(size, steps=5)])
        assert before.keys() == after.keys()
        for name, total in before.items():
            assert (after[name] - total).norm() / total.norm() < 1e-6
    record = resumed(3, steps=12)[0].record
    assert record["status"] == "done"
    assert record["num_steps"] == 12


def test_ranks_that_cannot_have_their_own_weights_go_on_from_the_mean() -> None:
    train(3, "strategy=diloco", "sync.every=2", "steps=10", "checkpoint_every=5", "cell=a", *SMALL)
    shared, owns = checkpoint.load(AT_STEP_5)
    assert shared["sync"]["anchor"]  # in the middle of a round
    settings = (f"resume={AT_STEP_5}", *SMALL)
    for outcome in train(2, "strategy=diloco", "steps=5", *settings):
        for name, weight in outcome.weights.items():
            each = torch.stack([own["model"][name] for own in owns])
            assert not torch.equal(each[0], each[1])
            torch.testing.assert_close(weight, each.mean(dim=0))
    for strategy, size in (("diloco", 2), ("allreduce", 3)):
        outcomes = train(size, f"strategy={strategy}", "steps=9", *settings)
        hashes = {outcome.record["replica_hash"] for outcome in outcomes}
        assert len(hashes) == 1 and None not in hashes


def test_steps_that_another_run_made_are_told_in_record_summary_and_page(tmp_path: Path) -> None:
    both = ("strategy=none", "model=mlp", f"runs_dir={tmp_path}", "study=s", "data.size=8")
    train(1, *both, "cell=a", "seed=1", "batch_size=8", "steps=4", "checkpoint_every=2")
    resume = f"resume={tmp_path}/s/a/checkpoints/step_000004"
    found = train(2, *both, "cell=b", "seed=2", "batch_size=4", "steps=6", resume)[0].record
    first, second = found["stretches"]
    assert (first["first_step"], first["end_step"], first["cell"]) == (0, 4, "s/a")
    assert (first["world_size"], first["batch_size"]) == (1, 8)
    assert first["settings"] == {"steps": 4, "seed": 1, "checkpoint_every": 2}
    assert (second["first_step"], second["end_step"], second["cell"]) == (4, 6, "s/b")
    record = read_record(tmp_path / "s/b/record.json")
    lines = summary(record, tmp_path)
    assert "\nsteps 0-3       by s/a on 1 rank, batch_size=8, commit " in lines
    assert "; steps=4, seed=1, checkpoint_every=2" in lines
    page = contents_of(tmp_path / "s", "s1-")
    (table,) = (one for one in page.tables if one.title.startswith("Runs in which steps were"))
    assert len(table.rows) == 2
    assert read_record(tmp_path / "s/a/record.json").stretches == []
