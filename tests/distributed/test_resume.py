"""Checkpoints: the same bits at the same number of ranks, the same sums at another."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from lab.settings.config import build, load
from lab.training import checkpoint
from tests.support.cases import BY_THE_CLOCK, RESUMED, STRATEGIES, keeps_replicas_equal
from tests.support.ranks import Outcome, train

RUN = ("data.size=16", "batch_size=24", "optim.lr=0.01", "warmup_steps=1")
HALF_WAY = Path("runs/default/a/checkpoints/step_000005")


@pytest.fixture(autouse=True)
def own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# On four ranks those whose sums, residuals or weights could then be another's. DDP, whose buckets
# after a resume are not those of before, then equals itself to rounding alone.
CASES = [(s, 2) for s in STRATEGIES]
CASES += [(s, 4) for s in ("allreduce", "layerwise", "onebit", "powersgd", "local_sgd")]


@pytest.mark.parametrize(("strategy", "size"), CASES)
def test_resumed_run_ends_in_the_same_bits(strategy: str, size: int) -> None:
    own = RESUMED.get(strategy, ())
    settings = (f"strategy={strategy}", "checkpoint_every=5", "steps=10", *own, *RUN)
    whole = train(size, *settings, "cell=a")
    resumed = train(size, *settings, "cell=b", f"resume={HALF_WAY}")
    if not keeps_replicas_equal(
        strategy
    ):  # replicas differ, and a checkpoint holds rank 0's weights
        whole, resumed = whole[:1], resumed[:1]
    for one, other in zip(whole, resumed, strict=True):
        assert same(one.weights, other.weights)
        for kind, residuals in one.exchange_state.items():
            assert residuals or strategy in BY_THE_CLOCK  # which may have dropped what has them
            assert same(residuals, other.exchange_state[kind])
    has_state = bool(build(load([f"strategy={strategy}"]).exchange).state_dict())
    assert has_state == bool(whole[0].exchange_state)


def sum_of_residuals(states: list[dict[str, dict[str, Tensor]]]) -> dict[str, Tensor]:
    """Over the ranks: residuals are added, stripes lie one below the other."""
    return {
        f"{kind}/{name}": combine([state[kind][name].double() for state in states])
        for kind, combine in (("residual", _add), ("stripe_residual", torch.cat))
        for name in states[0][kind]
    }


def _add(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors).sum(dim=0)


@pytest.mark.parametrize("size", [2, 3])
def test_residuals_keep_their_sum_at_another_number_of_ranks(size: int) -> None:
    settings = ("strategy=onebit", *RUN)
    train(4, *settings, "steps=5", "checkpoint_every=5", "cell=a")
    before = sum_of_residuals([own["exchange"] for own in checkpoint.load(HALF_WAY)[1]])
    assert all(total.norm() > 0 for total in before.values())

    def resumed(steps: int) -> list[Outcome]:
        return train(size, *settings, f"steps={steps}", f"resume={HALF_WAY}")

    after = sum_of_residuals([outcome.exchange_state for outcome in resumed(steps=5)])
    assert before.keys() == after.keys()
    for name, total in before.items():
        assert (after[name] - total).norm() / total.norm() < 1e-6
    record = resumed(steps=12)[0].record
    assert record["status"] == "done"
    assert record["num_steps"] == 12


def test_ranks_that_cannot_have_their_own_weights_go_on_from_the_mean() -> None:
    train(3, "strategy=diloco", "sync.every=2", "steps=10", "checkpoint_every=5", "cell=a", *RUN)
    shared, owns = checkpoint.load(HALF_WAY)
    assert shared["sync"]["anchor"]  # in the middle of a round
    settings = (f"resume={HALF_WAY}", *RUN)
    for outcome in train(2, "strategy=diloco", "steps=5", *settings):
        for name, weight in outcome.weights.items():
            each = torch.stack([own["model"][name] for own in owns])
            assert not torch.equal(each[0], each[1])
            torch.testing.assert_close(weight, each.mean(dim=0))
    for strategy, size in (("diloco", 2), ("allreduce", 3)):
        outcomes = train(size, f"strategy={strategy}", "steps=9", *settings)
        hashes = {outcome.record["replica_hash"] for outcome in outcomes}
        assert len(hashes) == 1 and None not in hashes
