"""The replayed model in the whole trainer, with the same exchanges as any model."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from tests.support.ranks import Outcome, train
from tests.support.slow import some_of

RUN = (
    *("model=replay", "profile=alexnet_titanx", "model.bytes_scale=0.002", "model.time_scale=0.01"),
    *("data=synthetic", "data.shape=[1,8,8]", "batch_size=64", "steps=6", "warmup_steps=1"),
)
NUM_VALUES = 124_757


@cache
def single_process(directory: str) -> Outcome:
    return train(1, "strategy=none", f"runs_dir={directory}", *RUN)[0]


@pytest.mark.parametrize("strategy", some_of(["allreduce", "overlap", "ddp", "onebit"], every=2))
def test_strategies_average_its_gradients(
    strategy: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    outcomes = train(2, f"strategy={strategy}", *RUN)
    records = [outcome.record for outcome in outcomes]
    assert {record["status"] for record in records} == {"done"}
    assert len({record["replica_hash"] for record in records}) == 1
    assert records[0]["model"] == "Replay"
    replay = {"kind": "replay", "detail": "compute replayed from profile alexnet_titanx"}
    assert replay in records[0]["emulation"]
    assert records[0]["gradient_bytes"] == 4 * NUM_VALUES
    if strategy == "onebit":
        assert records[0]["payload_bytes_per_step"][0] < 4 * NUM_VALUES / 20
        return
    for name, weight in single_process(str(tmp_path_factory.getbasetemp())).weights.items():
        torch.testing.assert_close(outcomes[1].weights[name], weight)
