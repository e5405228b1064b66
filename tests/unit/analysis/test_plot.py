"""lab.plot: files that it writes, figures that it skips, and refusals."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from lab.analysis.runs import WAIT, own_work
from lab.measure import OWN
from lab.plot import main
from lab.record.schema import Emulation
from tests.support.commands import refusal, said
from tests.support.records import leave, make_record
from tests.support.svg import outside, overlapping
from tests.support.wandb_file import only, settled

FIGURES = ("speedup_bars", "scaling", "throughput", "step_time", "payload", "convergence")
PHASES_S = {"data": 0.01, "forward": 0.1, "backward": 0.2, "exchange": 0.05, "update": 0.01}


def write_run(study: Path, strategy: str, ranks: int, repeat: int = 0, **more: Any) -> None:
    """Write a finished run of 20 steps with a loss curve and two evaluations."""
    seconds = 1.0 / ranks + 0.1 * (ranks - 1)
    shared = [Emulation("shared_cores", f"{ranks} threads of {ranks} ranks share 2 CPU cores")]
    defaults: dict[str, Any] = {
        "emulation": [] if ranks < 4 else shared,
        "payload_bytes_per_step": [0 if strategy == "none" else 4_000_000 * (ranks - 1)] * ranks,
        "num_parameters": 1_000_000,
        "final": {"loss": 0.5, "accuracy": 0.75},
        "evaluations": [
            {"step": 10, "seconds": 10 * seconds, "loss": 1.0, "accuracy": None},
            {"step": 20, "seconds": 20 * seconds, "loss": 0.5, "accuracy": 0.75},
        ],
    }
    median = seconds * (1 + 0.01 * repeat)
    record = make_record(strategy, ranks, median, repeat=repeat, **(defaults | more))
    folder = study / f"{strategy}-{ranks}-{repeat}-{record.scaling}-{record.measure}"
    leave(folder, record)
    step = np.tile(np.arange(20), ranks)
    steps = {"step": step, "loss": 2.0 / (1 + step), "end_s": (step + 1) * seconds}
    pd.DataFrame({"rank": np.repeat(np.arange(ranks), 20), **steps}).to_parquet(
        folder / "steps.parquet"
    )


@pytest.fixture
def study(tmp_path: Path) -> Path:
    folder = tmp_path / "demo"
    for repeat in range(2):
        for ranks in (1, 2, 4):
            for strategy in ("none", "tree"):
                write_run(folder, strategy, ranks, repeat)
            write_run(folder, "fc1x1", ranks, repeat, transform="FCToConv")
    return folder


def test_wandb_keeps_figures_and_tables_as_an_artifact_of_the_study(
    study: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert main([str(study), "format=svg", "only=scaling", "recorder=wandb"]) == 0
    (start,) = settled(study)
    run = only(start, "run")[0]
    assert (run.run_group, run.job_type) == ("demo", "figures")
    ((*entries,),) = (artifact.manifest.contents for artifact in only(start, "artifact"))
    written = {"records.csv", "records.parquet", "scaling.svg", "summary.csv"}
    assert {entry.path for entry in entries} == written


def test_all_figures_are_written(study: Path) -> None:
    assert main([str(study)]) == 0
    written = {path.name for path in (study / "figures").iterdir()}
    expected = {f"{name}.{kind}" for name in FIGURES for kind in ("png", "svg")}
    assert written == expected | {"summary.csv", "records.csv", "records.parquet"}
    out = said(main, str(study), "only=payload", "format=svg")
    assert "skipped" not in out and "missing" not in out  # the folder of figures is no cell
    for figure in FIGURES:
        svg = (study / "figures" / f"{figure}.svg").read_text()
        assert svg.count(">tree<") <= 4  # a line's name stands at its end, once in each panel
        assert overlapping(svg) == outside(svg) == []


def test_a_title_names_the_baseline(study: Path) -> None:
    arguments = [str(study), "format=svg", "only=speedup_bars"]
    assert main(arguments) == 0
    assert (
        "Speedup over none on 1 rank (fc1x1: its own), strong scaling"
        in (study / "figures/speedup_bars.svg").read_text()
    )
    shutil.rmtree(study)
    for strategy in ("tree", "ring"):
        for ranks in (1, 2):
            write_run(study, strategy, ranks)
    assert main(arguments) == 0
    drawn = (study / "figures" / "speedup_bars.svg").read_text()
    assert "Speedup over each series' own 1-rank run, strong scaling" in drawn


def test_a_caption_replaces_title_and_notes(study: Path) -> None:
    arguments = [str(study), "format=svg", "width_in=3.3", "only=throughput,step_time"]
    printed = said(main, *arguments, "title=false")
    assert printed.count("caption: ") == 2
    assert "caption: With tree, " in printed and "Study demo · model AlexNet" in printed
    drawn = (study / "figures/throughput.svg").read_text()
    assert 'width="237.6pt"' in drawn and "Study demo" not in drawn
    assert overlapping(drawn) == outside(drawn) == []
    assert "caption: " not in said(main, *arguments)
    assert "Study demo" in (study / "figures/throughput.svg").read_text()


def test_a_cells_own_work_is_a_bar_a_rank(study: Path, tmp_path: Path) -> None:
    cell = study / "tree-2-0-strong-throughput"
    rows = [
        (rank, {"update": 0.01, "between": 0.0, "forward": 0.1 + 0.2 * rank}) for rank in (0, 1)
    ]
    pd.DataFrame(
        {
            **{"rank": rank, "step": 0, "timed": True, "step_s": 0.4},
            **{f"own_{name}_s": own.get(name, np.nan) for name in OWN},
        }
        for rank, own in rows
    ).to_parquet(cell / "steps.parquet")
    assert main([str(cell), "format=svg", f"out={tmp_path / 'own'}"]) == 0
    drawn = (tmp_path / "own/ranks.svg").read_text()
    assert "Rank 1 works 310 ms per step, the median of the others 110 ms" in drawn
    assert overlapping(drawn) == outside(drawn) == []


def test_the_work_of_an_exchange_is_shared_by_all_steps_of_its_round() -> None:
    steps = pd.DataFrame({"rank": 0, "step": range(4), "timed": True, "step_s": 1.0})
    steps = steps.assign(**{f"own_{name}_s": 0.0 for name in OWN}).assign(own_input_s=np.nan)
    steps["own_exchange_s"] = [np.nan, 0.4, np.nan, 0.8]
    own = own_work(steps)
    assert own["exchange"].item() == pytest.approx(0.3)
    assert own[WAIT].item() == pytest.approx(0.7) and "input" not in own


def test_weak_and_strong_are_drawn_apart(study: Path) -> None:
    write_run(study, "none", 1, scaling="weak")
    write_run(study, "none", 2, scaling="weak")
    assert main([str(study), "format=svg", "only=speedup_bars"]) == 0
    names = {path.stem for path in (study / "figures").glob("*.svg")}
    assert names == {"speedup_bars", "speedup_bars_weak"}


def test_breakdown_runs_alone_give_the_phases(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for strategy in ("none", "tree"):
        write_run(tmp_path, strategy, 2, measure="breakdown", phases_s=PHASES_S)
    assert main([str(tmp_path), "format=svg"]) == 0
    assert (tmp_path / "figures" / "step_time.svg").is_file()
    out = capsys.readouterr().out
    assert "skipped speedup_bars: no finished throughput run" in out
    assert "skipped convergence: no finished throughput run (strategy=none on several" in out


def test_a_single_point_is_a_line(tmp_path: Path) -> None:
    write_run(tmp_path, "tree", 2)
    first, empty, *_ = said(main, str(tmp_path), "only=payload", "format=svg").splitlines()
    assert first.startswith("series tree, N 2, batch 64, scaling strong, n 1, step ms 600, ")
    assert first.endswith("runs 1 done, emulation none") and empty == ""


def test_failed_runs_alone_are_listed(tmp_path: Path) -> None:
    write_run(tmp_path, "tree", 2, status="failed", error="rank 1: broken", step_s=None)
    assert "failed: tree-2-0-strong-throughput: rank 1: broken" in said(
        main, str(tmp_path), "format=svg"
    )


def test_runs_without_curves_skip_convergence(tmp_path: Path) -> None:
    write_run(tmp_path, "tree", 1, evaluations=[])
    next(tmp_path.glob("*/steps.parquet")).unlink()
    assert "skipped convergence: no run recorded a loss or a test result" in said(
        main, str(tmp_path), "only=convergence"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent"], "absent: no such folder"),
        (["."], "contains no <cell>/record.json"),
        (["demo", "baseline=ring"], "baseline=ring: has no"),
        (["demo", "out=demo/none-1-0-strong-throughput/record.json"], "File exists"),
    ],
)
def test_wrong_input_is_one_line_and_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    write_run(tmp_path / "demo", "none", 1)
    monkeypatch.chdir(tmp_path)
    assert message in refusal(main, *arguments)


def test_only_some_figures_are_drawn(study: Path) -> None:
    assert main([str(study), "format=svg", "only=speed,payload"]) == 0
    written = {path.name for path in (study / "figures").glob("*.svg")}
    assert written == {"speedup_bars.svg", "payload.svg"}
    assert "only=speedups: no such figure; allowed: speedup_bars, scaling," in refusal(
        main, str(study), "only=speedups"
    )


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("width_in=wide", "width_in=wide: must be a number from 2 to 100"),
        ("width_in=0.5", "width_in=0.5: must be a number from 2 to 100"),
        ("title=no", "title=no: must be true or false"),
        ("format=jpg", "format=jpg: allowed: png, svg, pdf"),
        ("target=x", "target=x: must be a number"),
    ],
)
def test_a_wrong_setting_is_named(setting: str, message: str) -> None:
    assert refusal(main, "runs/x", setting) == message
