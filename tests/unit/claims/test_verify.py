"""lab.verify: columns, verdicts, exit codes, and the page."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from lab import verify
from lab.claims import figures
from lab.claims.claims import Reproduction
from lab.claims.findings import verify as verify_paper
from lab.claims.page import crossovers_tables
from lab.claims.predicted import (
    MARGIN,
    Predicted,
    crossovers,
    profile_of,
    rate_speedups,
    strategy_of,
)
from lab.draw.chart import drawn
from lab.record.schema import Emulation, read_record
from lab.settings.config import load
from lab.settings.files import read_file
from lab.simulate.hardware import Link, parse
from lab.simulate.step import simulate
from tests.support.commands import refusal, said
from tests.support.records import leave, make_record
from tests.support.svg import overlapping

pytestmark = pytest.mark.xdist_group("verify")  # shares the study, and what papers are predicted by


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Simulate a study on links a little slower than the preset's; nothing is measured."""
    folder = tmp_path_factory.mktemp("runs") / "kim2017"
    preset = parse(read_file("hardware", "emulated_1gbit"))
    hardware = replace(preset, inter=Link(1e-4, 1.18e8), overhead_s=2e-3)
    profile = profile_of("alexnet_titanx", 0.02124)
    replays = ["model=replay", "profile=alexnet_titanx", "model.bytes_scale=0.02124"]
    for name in ("none", "tree", "allreduce", "overlap", "tree_overlap", "onebit"):
        config = OmegaConf.to_yaml(load([f"strategy={name}", *replays]))
        for size in (1, 2, 4):
            for batch_size in (128, 256, 512):
                step = simulate(profile, hardware, strategy_of(name), size, batch_size // size)
                record = make_record(name, size, step.step_s, batch_size=batch_size, model="replay")
                record.emulation = [Emulation("replay", "compute replayed from a profile")]
                record.payload_bytes_per_step = [round(step.payload_bytes)] * size
                cell = folder / f"{name}-n{size}-b{batch_size}"
                leave(cell, record)
                (cell / "config.yaml").write_text(config)
    return folder


def test_predictions_alone_say_so() -> None:
    text = said(verify.main, "kim2017", code=1)  # CNTK's speedup is predicted too high, Torch's low
    assert "Nothing has been measured yet. Run " in text and "measurements ran on" not in text
    failed = [row for row in rows(text) if "model misses by" in row]
    assert [name in row for name, row in zip(("Torch", "2.62"), failed, strict=True)] == [True] * 2
    assert text.count(": agrees") == len(rows(text)) - 2
    assert "| counted exactly (operations or bytes, not times) | 4 | 4 | 0 | 0 |" in text
    predicted = "| predicted by the cost model (training) | 6 | 4 | 2 | 0 | "
    _, _, training = text.partition(predicted)
    assert "(4 scaling figures); skill " in training.partition("\n")[0]


def test_what_was_measured_decides(runs: Path) -> None:
    table = rows(said(verify.main, "kim2017", f"runs={runs}", code=1))
    # No cell here runs a framework's emulator or has the other profile.
    apart = re.compile("Caffe: |Torch: |TensorFlow: |2.62|1x1")
    assert all(apart.search(row) for row in table if row.split("|")[-3].strip() == "–")
    assert sum("measured on an emulated cluster: agrees" in row for row in table) == 5
    megabytes = next(row for row in table if "250 MB" in row)
    assert megabytes.split("|")[7].strip() == "2.495e+08"


def test_a_claim_that_fails_is_an_exit_code(runs: Path, tmp_path: Path) -> None:
    slow = tmp_path / "kim2017"
    slow.mkdir()
    for cell in runs.iterdir():
        record = read_record(cell / "record.json")
        if (record.strategy, record.world_size) == ("onebit", 4):
            record.payload_bytes_per_step = [2 * n for n in record.payload_bytes_per_step or ()]
        leave(slow / cell.name, record)
    text = said(verify.main, "kim2017", f"runs={slow}", code=1)
    failed = [row for row in rows(text) if "counted: differs" in row]
    assert len(failed) == 1 and "1/32" in failed[0]


@pytest.mark.slow
def test_the_page_scores_predictions_and_shows_figures(runs: Path, tmp_path: Path) -> None:
    page = tmp_path / "kim.md"
    assert verify.main(["kim2017", f"runs={runs}", f"out={page}"]) == 1
    text = page.read_text()
    sentence = r"the (\d+) held-out cells .* median error of the predicted step time is ([\d.]+) %"
    score = re.search(sentence, text)
    assert score and int(score[1]) == 15 and float(score[2]) < 1
    assert f"python -m lab.verify kim2017 runs={runs} out={page}" in text
    pictures = re.findall(r"!\[\w+\]\((kim/\w+\.png)\)", text)
    names = ("claims", "speedup", "bandwidth", "regimes")
    assert pictures == [f"kim/{name}.png" for name in names]
    assert all((tmp_path / picture).is_file() for picture in pictures)


@pytest.mark.slow
def test_findings_hold_what_the_page_says(runs: Path) -> None:
    findings = verify_paper("kim2017", runs, reproduce=True)
    assert [v.claim.published for v in findings.verdicts if v.outcome == "fails"] == [1.5, 2.62]
    chart = figures.verdicts(findings.verdicts, ["note"])
    assert chart and chart.message.startswith("Counted: 4 of 4 agree; predicted: ")
    assert overlapping(drawn(chart.spec(), "svg").decode()) == []
    assert findings.reproduced
    assert findings.reproduced.scored and len(findings.reproduced.scored) == 54
    assert {cell.evidence for cell in findings.reproduced.scored} == {"fitted", "held out"}
    grid, paper = findings.reproduced.grid, findings.reproduced.paper
    assert grid.rate_crossover == ("onebit", "overlap")
    batches, rates = crossovers(grid, paper)
    assert batches["none"] == 4 and (batches["tree"] or 0) > 128  # 4 ranks, one image each
    # Below the crossover rate, the first of the pair is faster in the rates as well.
    speedups = rate_speedups(grid, paper).pivot(
        index=["batch", "rate"], columns="strategy", values="speedup"
    )
    for row in speedups.reset_index().to_dict("records"):
        crossover = rates[row["batch"]]
        assert crossover is not None
        assert (row["onebit"] > MARGIN * row["overlap"]) == (row["rate"] < crossover)


def test_a_paper_without_a_pair_has_no_crossover_of_rates() -> None:
    grid = Reproduction("s", "h", 1.0, ("tree",), (1, 2), (128,))
    hardware = parse(read_file("hardware", "titanx_x4"))
    predicted = Predicted("alexnet_titanx", hardware)
    assert crossovers(grid, predicted)[1] == {}
    text = "\n".join(crossovers_tables(grid, predicted))
    assert "| strategy | smallest global batch at which 2 ranks are faster than one |" in text
    assert "below" not in text


def test_papers_without_a_study_are_predicted() -> None:
    text = said(verify.main, "horovod", code=1)
    assert "weak efficiency 0.68 ± 10 % | 0.68 | 0." in text
    text = said(verify.main, "tf_benchmarks", code=1)
    failed = {
        row.split("|")[1].split(":")[0].strip() for row in rows(text) if "| model misses" in row
    }
    assert failed == {"AlexNet, batch 512", "VGG-16, batch 32"}
    assert "there is no study for Horovod" in refusal(verify.main, "horovod", "runs=runs/horovod")


def test_several_papers_of_which_nothing_is_known_have_no_figure(tmp_path: Path) -> None:
    claim = "{says: s, source: p, quantity: slowdown, at: {result: x}, check: {at_least: 1}}"
    words = [str(tmp_path / f"{name}.yaml") for name in ("a", "b")]
    for word in words:
        Path(word).write_text(f"title: t\nbenches: {{x: counters vgg16}}\nclaims: [{claim}]\n")
    said(verify.main, *words, f"out={tmp_path}/page.md")
    text = (tmp_path / "page.md").read_text()
    assert "| not tested: we have no measurement | 2 |" in text and "claims.png" not in text


def test_several_papers_are_one_page(tmp_path: Path) -> None:
    assert verify.main(["mlperf", "nvidia2017", f"out={tmp_path}/page.md"]) == 0
    text = (tmp_path / "page.md").read_text()
    assert text.count("\n## ") == 2 and "| mlperf | 1 of 1 | – | – | 1 | – |" in text
    assert "arithmetic: agrees (the source prints no such figure)" in text
    assert (tmp_path / "page/claims.png").stat().st_size > 10_000


def test_wrong_paths_are_one_line(tmp_path: Path) -> None:
    for paper, wrong in (
        *(("kim2017", f"runs={tmp_path}/no"), ("kim2017", f"out={tmp_path}/no/page.md")),
        *(("zhao2016", f"benches={tmp_path}/no"), ("zhao2016", f"runs={tmp_path}")),
    ):
        assert str(tmp_path) in refusal(verify.main, paper, wrong)
    several = refusal(verify.main, "kim2017", "h100", f"runs={tmp_path}/no")
    assert f"runs={tmp_path}/no: must be a folder of studies" in several


def rows(text: str) -> list[str]:
    """Return the lines of all claims, without headers."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [
        line
        for line in lines
        if line.count("|") > 8 and "| ---" not in line and "| claim |" not in line
    ]
