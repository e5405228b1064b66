"""Sweeps run missing cells, show failed ones, and continue after being killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import psutil
import pytest

from tests.conftest import Finished, record, wait_for
from tests.support import HANG_S
from tests.support.commands import begun
from tests.support.svg import boxes_of

Command = Callable[..., Finished]
QUICK = ("device=cpu", "batch_size=24", "data.size=16", "optim.lr=0.01", "steps=8")


def cells(root: Path) -> list[Path]:
    return [path.parent for path in root.glob("*/record.json")]


@pytest.mark.slow
def test_a_killed_sweep_leaves_nothing_running_and_goes_on(
    command: Command, real_environment: dict[str, str], tmp_path: Path
) -> None:
    grid = ("study=s", "strategy=overlap", "world_size=1,2", "repeats=1", *QUICK[:-1], "steps=60")
    log = tmp_path / "sweep.log"
    with log.open("w") as output:
        sweep = subprocess.Popen(
            [sys.executable, "-m", "lab.sweep", *grid],
            cwd=tmp_path, env=real_environment, stdout=output, stderr=output,
        )  # fmt: skip
    try:
        wait_for(lambda: ended(sweep, log) or num_begun(tmp_path / "runs/s") == 2)
        children = psutil.Process(sweep.pid).children(recursive=True)
    finally:
        sweep.kill()
        sweep.wait()
    done = started(tmp_path)
    assert len(done) == 1

    again = command("lab.sweep", "study=s")  # its grid is saved
    assert again.code == 0, again.err
    assert "study=s: the grid saved in runs/s/study.json" in again.out
    assert again.out.count("done already") == 1
    assert "2 of 2 cells done" in again.out
    assert "ETA" in again.out
    assert started(tmp_path).items() > done.items()
    assert not psutil.wait_procs(children, timeout=HANG_S)[1]

    # The same study with one cell that does not fit into memory: only this one runs, and again.
    before = started(tmp_path)
    more = command(
        "lab.sweep", "study=s", "strategy=onebit", "world_size=1", "model=mlp",
        "model.hidden=[1,900000000000000]", *QUICK,
    )  # fmt: skip
    assert more.code == 1  # none of its cells is done
    assert "oom: rank 0" in more.out
    assert started(tmp_path).items() > before.items()
    retried = command("lab.sweep", "study=s", "retry=failed")
    assert retried.out.count("done already") == 2 and "oom: rank 0" in retried.out
    (attempt,) = (tmp_path / "runs/s").glob("onebit-*/failed-1")
    assert record(attempt)["status"] == "oom"

    plotted = command("lab.plot", "runs/s", "format=svg")
    assert plotted.code == 0, plotted.err
    assert "oom" in plotted.out
    table = pd.read_csv(tmp_path / "runs/s/figures/summary.csv")
    assert set(table["strategy"] if "strategy" in table else table["series"]) >= {
        "overlap",
        "onebit",
    }
    drawn = (tmp_path / "runs/s/figures/speedup_bars.svg").read_text()
    texts = [box.text for box in boxes_of(drawn)]
    assert any(text.startswith("overlap") for text in texts), texts


def ended(sweep: subprocess.Popen[bytes], log: Path) -> bool:
    """Fail, with the sweep's output, if it has ended."""
    assert sweep.poll() is None, log.read_text()
    return False


def num_begun(study: Path) -> int:
    return sum(1 for _ in study.glob("*/config.yaml"))


def started(folder: Path) -> dict[Path, str]:
    """Map each cell with a record to the time when it started."""
    return {path: record(path)["started_at"] for path in cells(folder / "runs/s")}


def test_repeats_are_the_outermost_loop() -> None:
    from lab.study.grid import read

    settings = ["strategy=none,tree", "world_size=1,2", "batch_size=64,128", "repeats=2"]
    study = read([*settings, "baselines=all"])
    assert [cell.repeat for cell in study.cells] == [0] * 8 + [1] * 8
    assert [cell.strategy for cell in study.cells[:4]] == ["none", "tree"] * 2


def test_cells_of_a_repeat_run_in_an_order_of_its_own_and_those_to_compare_together() -> None:
    from lab.study.grid import read
    from lab.study.run import shuffled

    settings = ["strategy=none,tree", "world_size=1,2", "batch_size=64,128", "repeats=6"]
    cells = read([*settings, "baselines=all"]).cells
    run = shuffled(cells)
    assert run == shuffled(cells) and sorted(c.name for c in run) == sorted(c.name for c in cells)
    repeats = [run[at : at + 8] for at in range(0, 48, 8)]
    assert [{cell.repeat for cell in each} for each in repeats] == [{number} for number in range(6)]
    pairs = [each[at : at + 2] for each in repeats for at in range(0, 8, 2)]
    assert all((a.world_size, a.batch_size) == (b.world_size, b.batch_size) for a, b in pairs)
    assert {first.strategy for first, _ in pairs} == {"none", "tree"}
    places = [tuple((c.world_size, c.batch_size) for c in each[::2]) for each in repeats]
    assert len(set(places)) > 1


def test_interrupted_sweep_runs_the_cell_anew_and_ends_one_that_takes_too_long(
    command: Command, environment: dict[str, str], tmp_path: Path
) -> None:
    line = ("lab.sweep", "study=s", "strategy=none", *QUICK[:-1], "steps=1000000")
    sweep = begun(environment, tmp_path, *line, stderr=subprocess.PIPE)
    wait_for(lambda: list((tmp_path / "runs/s").glob("*/config.yaml")))
    os.kill(sweep.pid, signal.SIGINT)
    _, err = sweep.communicate(timeout=HANG_S)
    assert sweep.returncode == 130
    assert "run the same command to continue" in err
    (cell,) = cells(tmp_path / "runs/s")
    assert record(cell)["status"] == "interrupted"

    again = command(*line, "cell_timeout_s=3")
    assert "timeout: cell_timeout_s=3" in again.out  # it ran anew, from the start
    assert record(cell)["status"] == "timeout"
