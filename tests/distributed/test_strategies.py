"""Every strategy on one and three ranks, through the whole trainer, on real data.

On two and four, test_wire.py and test_resume.py; on up to 17, as threads,
tests/unit/exchange/test_exchanges.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.cases import (
    DIRECTIONS,
    REPEATABLE,
    STEADY,
    STRATEGIES,
    is_exact,
    keeps_replicas_equal,
    steps_of_a_round,
)
from tests.support.ranks import Outcome, train, train_on_two_nodes, train_once
from tests.support.slow import some_of

RUN = ("data.size=16", "batch_size=24", "optim.lr=0.01", "steps=20", "warmup_steps=2")
SIZES = (1, 3)


def distance(weights: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    """Return the relative distance over all weights together."""
    ours, theirs = (
        torch.cat([tensors[name].flatten() for name in reference]).double()
        for tensors in (weights, reference)
    )
    return float((ours - theirs).norm() / theirs.norm())


# Tests of one strategy share a run, and so a process of xdist.
BY_STRATEGY = [pytest.param(s, marks=pytest.mark.xdist_group(f"strategy {s}")) for s in STRATEGIES]


def undisturbed(size: int, strategy: str, shared: Path, *settings: str) -> list[Outcome]:
    """Run 20 steps, with checkpoints after 7 and 14."""
    place = f"runs_dir={shared}/{strategy}-{size}"
    return train_once(
        size,
        f"strategy={strategy}",
        *settings,
        "checkpoint_every=7",
        *RUN,
        place,
    )


def single_process(transform: str, shared: Path) -> dict[str, Tensor]:
    """Return the weights that one process reaches on the whole batch, without an exchange."""
    settings = ("strategy=none", f"transform={transform}", f"runs_dir={shared}/single")
    return train_once(1, *settings, *RUN)[0].weights


@pytest.mark.parametrize("size", some_of(SIZES, also=[3]))
@pytest.mark.parametrize("strategy", some_of(BY_STRATEGY, every=2))
def test_trains_and_keeps_replicas_equal(strategy: str, size: int, shared: Path) -> None:
    outcomes = undisturbed(size, strategy, shared, "cell=a")
    for outcome in outcomes:
        assert outcome.code == 0
        assert outcome.record["status"] == "done"
        assert outcome.record["num_steps"] == 20
    losses = [evaluation["loss"] for evaluation in outcomes[0].record["evaluations"]]
    assert losses[-1] < 2.25  # log(10) = 2.303 without training
    if not keeps_replicas_equal(strategy):  # for timing only: the record has no hash
        assert outcomes[0].record["replica_hash"] is None
        return
    assert len({outcome.record["replica_hash"] for outcome in outcomes}) == 1
    if (every := steps_of_a_round(strategy)) > 1:
        ring = 2 * outcomes[0].record["gradient_bytes"] * (size - 1) / size
        for payload in outcomes[0].record["payload_bytes_per_step"]:
            # The only round that is timed is the last; fragments all travel again at its end.
            again = 1 + (strategy == "streaming_diloco")
            assert payload == pytest.approx(again * ring / every, rel=0.05)
    transform = "fc1x1" if strategy.startswith("fc1x1") else "none"
    far = distance(outcomes[0].weights, single_process(transform, shared))
    if is_exact(strategy):
        assert far < 1e-6
    else:
        assert far > 1e-6 or size == 1  # a strategy called lossy is lossy


def bitwise(outcomes: list[Outcome]) -> str:
    (found,) = {outcome.record["replica_hash"] for outcome in outcomes}
    return found


@pytest.mark.parametrize("exchange", some_of(REPEATABLE, every=6))
def test_overlapped_is_blocking_bit_for_bit(exchange: str) -> None:
    settings = ("strategy=allreduce", f"exchange={exchange}", "bucket_mb=0.05", *RUN, "steps=4")
    settings += (
        *STEADY.get(exchange, ()),
        *(["optim=direction"] if exchange in DIRECTIONS else []),
    )
    # Three ranks: the sum of two is the same in any order.
    run = train_on_two_nodes if exchange.startswith("hierarchical") else train
    blocking, overlapped = (run(3, *settings, f"overlap={on}") for on in ("false", "true"))
    assert bitwise(blocking) == bitwise(overlapped)
