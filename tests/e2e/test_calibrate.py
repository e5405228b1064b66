"""lab.calibrate as users start it: its ranks, and the files that it leaves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from lab.simulate.predict import read
from tests.conftest import Finished


def test_two_ranks_leave_a_hardware_file_that_predicts(
    command: Callable[..., Finished], tmp_path: Path
) -> None:
    settings = ["exchange=onebit", "device=cpu", "minutes=0.01", "out=mine.yaml"]
    done = command("lab.calibrate", *settings)
    assert done.code == 0, done.err
    result = json.loads((tmp_path / "mine.json").read_text())
    found = read([f"hardware={tmp_path / 'mine.yaml'}", "world_size=2"]).hardware
    assert found.intra and found.intra.bandwidth_bytes_per_s > 1e6 and found.inter is None
    assert found.device and dict(found.device.peak_flops_per_s)["fp32"] > 1e8
    keys = {each.key for each in found.assumed}
    measured = {"intra.latency_s", "contention", "jitter", "host.bucket_s", "codec_rates.OneBit"}
    assert measured <= keys
    assert [row["strategy"] for row in result["steps"]] == ["none", "onebit", "onebit_overlap"]
    page = (tmp_path / "mine.md").read_text()
    assert "Steps on 2 ranks were used in the fit. For 2 cells" in page
    assert (tmp_path / "mine.png").is_file()


@pytest.mark.slow
def test_larger_groups_than_two_meet_and_are_held_out(
    command: Callable[..., Finished], tmp_path: Path
) -> None:
    """Ranks of a smaller group make more process groups than others, by which torch names them."""
    settings = ["exchange=allreduce", "world_size=4", "device=cpu", "minutes=0.01"]
    done = command("lab.calibrate", *settings, "exchange_timeout_s=90", "out=mine.yaml")
    assert done.code == 0, done.err
    result = json.loads((tmp_path / "mine.json").read_text())
    assert {row["ranks"] for row in result["rows"]} == {2, 3, 4}
    assert result["scores"]["held_out"]["num_cells"] == 4
