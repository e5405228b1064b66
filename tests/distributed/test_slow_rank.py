"""A replayed model whose backward is delayed on one rank, as records of real ranks show it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tests.support.ranks import train

DELAY_S = 0.06
TIMES = ("step_s", *(f"own_{phase}_s" for phase in ("input", "forward", "backward", "update")))
RUN = (
    *("model=replay", "profile=alexnet_titanx", "model.bytes_scale=0.002", "model.time_scale=0.02"),
    *("data=synthetic", "data.shape=[1,8,8]", "batch_size=64", "steps=14", "warmup_steps=4"),
    *("straggler=planted", "straggler.rank=1", f"straggler.delay_ms={1e3 * DELAY_S}"),
)


@pytest.mark.parametrize("strategy", ["overlap", "ddp"])
def test_the_delay_is_its_own_work_alone(strategy: str, tmp_path: Path) -> None:
    """DDP's backward takes equally long on both: it waits for the other rank's gradients."""
    outcome, other = train(2, f"strategy={strategy}", f"runs_dir={tmp_path}", *RUN)
    (steps,) = (pd.read_parquet(path) for path in tmp_path.rglob("steps.parquet"))
    # The shortest of ten steps: other processes only ever add to one.
    shortest: Any = steps[steps["timed"]].groupby("rank")[list(TIMES)].min()
    late: Any = shortest.loc[1] - shortest.loc[0]
    assert late["own_backward_s"] == pytest.approx(DELAY_S, rel=0.3)
    for time in set(TIMES) - {"own_backward_s"}:  # and they end a step together
        assert abs(float(late[time])) < DELAY_S / 2, time
    last: Any = steps.assign(ready_s=steps["ready_s"].map(max))[steps["timed"]]
    ready: Any = last.groupby("rank")["ready_s"].min()
    assert float(ready[1] - ready[0]) == pytest.approx(DELAY_S, rel=0.3)
    detail = "rank 1 delayed by 60 ms in backward, every step"
    replay = {"kind": "replay", "detail": "compute replayed from profile alexnet_titanx"}
    assert replay in outcome.record["emulation"]
    assert {"kind": "straggler", "detail": detail} in outcome.record["emulation"]
    assert (outcome.record["model"], outcome.record["gradient_bytes"]) == ("Replay", 4 * 124_757)
    assert outcome.record["replica_hash"] == other.record["replica_hash"] is not None
