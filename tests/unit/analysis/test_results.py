"""`lab.load`: a study as a table, a summary and charts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import altair as alt
import pytest

import lab
from lab.analysis.results import Results
from tests.support.records import leave, make_record


@pytest.fixture
def results(tmp_path: Path) -> Results:
    """Return a study in which onebit takes half as long as ring on two ranks, three times each."""
    for repeat in range(3):
        noise = 1 + 0.001 * repeat
        for name, seconds in (("none", 0.4), ("ring", 0.4), ("onebit", 0.2)):
            for size in (1, 2) if name == "none" else (2,):
                record = make_record(name, size, seconds * noise / (size**0.5), repeat=repeat)
                leave(tmp_path / f"{name}-n{size}-r{repeat}", record)
    leave(tmp_path / "tree-n2", make_record("tree", 2, None, error="rank 1: no"))
    return lab.load(tmp_path)


def test_the_frame_has_a_row_for_each_run_also_for_failed_ones(results: Results) -> None:
    frame: Any = results.frame
    assert len(frame) == 13
    assert set(frame["strategy"]) == {"none", "ring", "onebit", "tree"}
    assert int(frame["step_s.median"].isna().sum()) == 1


def test_the_summary_has_a_row_for_each_point_and_says_who_leads(results: Results) -> None:
    summary: Any = results.summary().set_index(["series", "world_size"])
    assert summary.loc[("onebit", 2), "speedup_mid"] == pytest.approx(2 * 2**0.5)
    assert summary.loc[("onebit", 2), "num_repeats"] == 3
    assert summary.loc[("onebit", 2), "leads"]
    assert not summary.loc[("ring", 2), "leads"]
    assert summary.loc[("tree", 2), "num_failed"] == 1


def test_a_figure_is_a_chart_of_altair_with_the_message_as_its_title(results: Results) -> None:
    shown = results.figure("speedup")
    assert isinstance(shown, alt.TopLevelMixin)
    title = " ".join(shown.to_dict()["title"]["text"])
    assert title == "onebit is fastest: 2.83 × one rank, on 2 ranks at global batch 64"


def test_what_cannot_be_drawn_is_refused_in_a_line(results: Results) -> None:
    with pytest.raises(ValueError, match="figure=speed: no such figure; allowed: speedup_bars"):
        results.figure("speed")
    with pytest.raises(ValueError, match="scaling=weak: was not measured; allowed: strong"):
        results.figure("speedup", scaling="weak")
    with pytest.raises(ValueError, match="no such folder; give a study folder such as runs/demo"):
        lab.load("runs/nowhere")
    with pytest.raises(ValueError, match=r"test_results.py: is a file; give a study folder"):
        lab.load(__file__)


def test_a_folder_spelled_almost_right_is_suggested(tmp_path: Path) -> None:
    made = tmp_path / "runs" / "mine" / "onebit-n2-b32-with-a-long-name"
    made.mkdir(parents=True)
    for typed, meant in (("runs/mne", "runs/mine"), ("rns/mine", "runs/mine")):
        with pytest.raises(ValueError, match=f"; did you mean {tmp_path / meant}"):
            lab.load(tmp_path / typed)
    with pytest.raises(ValueError, match=f"; did you mean {made}"):
        lab.load(tmp_path / "runs/mine/onebit-n2")


def test_a_notebook_shows_a_table(results: Results) -> None:
    html = results._repr_html_()
    assert "13 runs" in html and html.count("<tr") == 1 + 5
    assert repr(results).endswith("13 runs, 5 points)")


def test_a_run_that_cannot_be_read_is_counted(tmp_path: Path) -> None:
    leave(tmp_path / "right", make_record("tree", 1, 1.2345))
    (tmp_path / "killed").mkdir()
    results = lab.load(tmp_path)
    assert repr(results).endswith("1 run, 1 unreadable, 1 point)")
    html = results._repr_html_()
    assert "1 run, 1 unreadable" in html and ">1234<" in html  # milliseconds of a step


def test_loading_imports_no_torch(results: Results) -> None:
    folder = results.study.folder
    program = f"import sys, lab; lab.load({str(folder)!r}).figure(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr
