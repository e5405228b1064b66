"""A rank that is delayed within backward, as records of real ranks show it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tests.support.ranks import train

DELAY_S = 0.06
RUN = (
    *("model=replay", "profile=alexnet_titanx", "model.bytes_scale=0.002", "model.time_scale=0.02"),
    *("data=synthetic", "data.shape=[1,8,8]", "batch_size=64", "steps=14", "warmup_steps=4"),
    *("straggler=planted", "straggler.rank=1", f"straggler.delay_ms={1e3 * DELAY_S}"),
)


@pytest.mark.parametrize("strategy", ["overlap", "ddp"])
def test_the_delay_is_its_own_work_alone(strategy: str, tmp_path: Path) -> None:
    """DDP's backward takes equally long on both: it waits for the other rank's gradients."""
    outcome, _ = train(2, f"strategy={strategy}", f"runs_dir={tmp_path}", *RUN)
    (steps,) = (pd.read_parquet(path) for path in tmp_path.rglob("steps.parquet"))
    timed = steps[steps["timed"]].groupby("rank").median(numeric_only=True)
    late: Any = timed.loc[1] - timed.loc[0]
    assert late["own_backward_s"] == pytest.approx(DELAY_S, rel=0.3)
    assert abs(float(late["step_s"])) < DELAY_S / 2  # they end a step together
    for phase in ("input", "forward", "update"):
        assert abs(float(late[f"own_{phase}_s"])) < DELAY_S / 2
    ready: Any = steps[steps["timed"]].groupby("rank")["ready_s"].last().map(max)
    assert float(ready[1] - ready[0]) == pytest.approx(DELAY_S, rel=0.3)
    detail = "rank 1 delayed by 60 ms in backward, every step"
    assert {"kind": "straggler", "detail": detail} in outcome.record["emulation"]
