"""lab.bench as users start it: its ranks, files and exit codes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from lab import bench
from tests.conftest import ROOT, wait_for
from tests.support import HANG_S


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    """Have ranks and their launchers fork from a process that has imported torch."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "executable", environment["PYTHON_EXEC"])


@pytest.mark.usefixtures("forked")
def test_collective_starts_its_ranks_and_leaves_json_and_figure(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = ["sizes=[4KiB,64KiB]", "exchange=tree", "world_size=2", "rounds=3", "device=cpu"]
    assert bench.main(["collective", *settings, "out=all.json"]) == 0
    result = json.loads((tmp_path / "all.json").read_text())
    rows = [(row["size_bytes"], row["algorithm"]) for row in result["rows"]]
    algorithms = ("allreduce", "tree", "sendrecv")
    assert rows == [(size, name) for size in (4096, 65536) for name in algorithms]
    assert result["world_size"] == 2 and result["command"].endswith("out=all.json")
    tree = result["rows"][4]
    assert tree["wrong"] == 0 and tree["busiest_rank_bytes"] == 65536
    assert tree["busbw_gb_per_s"] == pytest.approx(tree["algbw_gb_per_s"])  # at 2 ranks
    assert (tmp_path / "all.png").is_file()
    assert "#wrong" in capfd.readouterr().out


@pytest.mark.usefixtures("forked")
def test_reduce_scatter_compares_the_labs_with_torchs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = ["sizes=[12B,1MiB]", "world_size=2", "rounds=3", "device=cpu"]
    assert bench.main(["reduce_scatter", *settings, "out=all.json"]) == 0
    rows = json.loads((tmp_path / "all.json").read_text())["rows"]
    found = [(row["algorithm"], row["size_bytes"], row["wrong"]) for row in rows]
    assert found == [(name, size, 0) for size in (8, 2**20) for name in ("torch", "lab")]
    torchs, labs = (row["crossed_share"] for row in rows[2:])
    assert torchs >= 1 and labs >= 0.5  # other processes of this machine may send meanwhile
    assert "ratio to torch" in capfd.readouterr().out


@pytest.mark.usefixtures("forked")
def test_step_starts_ranks_anew_each_with_another_order(tmp_path: Path) -> None:
    small = ["model=mlp", "model.hidden=[8]", "batch_size=8", "steps=17", "device=cpu"]
    settings = ["strategy=overlap,ddp", "world_size=1", "starts=2", "order_seed=4", *small]
    assert bench.main(["step", *settings, "out=step.json"]) == 0
    result = json.loads((tmp_path / "step.json").read_text())
    assert [start["order_seed"] for start in result["starts"]] == [4, 5]
    first, second = (start["rows"][0]["ratio"]["median"] for start in result["starts"])
    assert result["rows"][0]["ratio"]["median"] == pytest.approx((first * second) ** 0.5)


@pytest.mark.usefixtures("forked")
def test_what_only_ranks_can_refuse_is_one_line_too(capfd: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["collective", "exchange=none", "sizes=[4KiB]", "device=cpu"]) == 2
    assert capfd.readouterr().err.startswith(
        "lab.bench: error: exchange=none does not average gradients"
    )


@pytest.mark.slow
def test_after_ctrl_c_no_rank_is_left() -> None:
    line = [sys.executable, "-m", "lab.bench", "collective", "sizes=[1MiB]", "rounds=100000"]
    process = subprocess.Popen(line, stderr=subprocess.PIPE, text=True)
    parent = psutil.Process(process.pid)

    def ranks() -> list[psutil.Process]:
        return [each for each in parent.children(recursive=True) if "RANK" in each.environ()]

    wait_for(lambda: len(ranks()) == 2)
    left = ranks()
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=HANG_S)
    assert process.returncode == 130 and error.endswith("stopped\n")
    assert not psutil.wait_procs(left, timeout=HANG_S)[1]
