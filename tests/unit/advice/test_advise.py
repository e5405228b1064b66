"""The command lab.advise."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lab import advise as command
from lab.advice import request
from lab.advice.request import read
from lab.advice.view import chart
from lab.claims.predicted import profile_of
from lab.draw.chart import drawn
from lab.settings.config import check_batch, load
from lab.simulate import predict
from lab.simulate.hardware import with_rate
from lab.simulate.predict import predicted
from lab.study.grid import read as read_grid
from tests.support.commands import refusal, said
from tests.support.simulated import TRUE, leave_study
from tests.support.svg import overlapping

SMALL = ("strategy=allreduce,overlap,onebit", "batch_size=256", "world_size=1,2,4")


def advice(folder: Path, *arguments: str) -> dict[str, Any]:
    """Write the advice to a file; return it."""
    out = folder / "advice.json"
    assert command.main([*arguments, f"out={out}"]) == 0
    return json.loads(out.read_text())


def first(result: dict[str, Any], kind: str) -> dict[str, Any]:
    return result["rows"][result["best"][kind][0]]


@pytest.mark.slow
def test_the_grid_is_chosen_from_the_hardware_and_the_settings() -> None:
    cells = read(["hardware=titanx_x4", "batch_size=2"]).prediction.cells
    assert {cell.world_size for cell in cells} == {1, 2}  # of up to four, those that divide it
    names = {cell.strategy for cell in cells}
    assert {"allreduce", "overlap", "onebit", "local_sgd", "tree"} <= names
    assert not names & {"none", "ddp", "horovod", "fc1x1", "caffe", "torch7", "tensorflow", "cntk"}


@pytest.mark.slow
def test_zeropp_is_an_option_where_hosts_have_several_ranks() -> None:
    def sizes(hardware: str) -> set[int]:
        cells = read(
            [f"hardware={hardware}", "batch_size=16", "world_size=1,8,16"]
        ).prediction.cells
        assert {cell.world_size for cell in cells if cell.strategy == "fsdp"} == {1, 8, 16}
        return {cell.world_size for cell in cells if cell.strategy == "zeropp"}

    assert sizes("v100x8_20g") == {1, 8, 16}
    assert sizes("emulated_1gbit") == {1}  # alone on its host, a rank would store all weights


@pytest.mark.slow
def test_a_setting_leaves_the_strategies_that_accept_it() -> None:
    small = ["batch_size=256", "world_size=2"]
    assert {c.strategy for c in read([*small, "exchange.threshold=mean"]).prediction.cells} == {
        "onebit"
    }
    names = {c.strategy for c in read([*small, "precision=fp16"]).prediction.cells}
    assert "local_sgd" not in names and "overlap" in names
    assert {c.strategy for c in read([*small, "strategy=caffe"]).prediction.cells} == {"caffe"}


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        ("strategy=allreduce overlap=false", True),
        ("strategy=fsdp overlap=false", False),
        ("strategy=local_sgd overlap=true", False),
        ("strategy=onebit_adam optim=adamw", False),
        ("strategy=caffe", False),
    ],
)
def test_what_cannot_run_is_not_chosen(words: str, kept: bool) -> None:
    assert all(map(request._may_be_chosen, read_grid(words.split()).cells)) == kept


def test_what_is_wrong_with_any_strategy_is_refused_before_all_are_composed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(request, "_strategies", pytest.fail)
    for wrong in (
        "batchsize=12",
        "hardware=mine",
        "hardware.ranks_per_node=mine",
        "world_size=two",
    ):
        assert wrong.rpartition(".")[2] in refusal(command.main, wrong)


@pytest.mark.slow
def test_a_batch_that_is_chosen_can_be_accumulated() -> None:
    cells = read(["world_size=1", "accumulate=3"]).prediction.cells
    assert all(cell.batch_size % 3 == 0 for cell in cells)


def test_ranks_divide_a_given_batch_and_batches_given_ranks() -> None:
    cells = read(["hardware=titanx_x4", "strategy=tree"]).prediction.cells
    assert {cell.world_size for cell in cells} == {1, 2, 4}
    assert {cell.batch_size for cell in cells} == {256, 512, 1024}  # a rank's, and that of all four
    some = ["hardware=eth10g", "strategy=tree"]
    cells = read([*some, "batch_size=24"]).prediction.cells
    assert [cell.world_size for cell in cells] == [1, 2, 4, 8]
    cells = read([*some, "world_size=3,6", "accumulate=2"]).prediction.cells
    assert all(cell.batch_size % (2 * cell.world_size) == 0 for cell in cells)
    cells = read([*some, "scaling=weak", "world_size=2"]).prediction.cells
    assert [cell.config.batch_size for cell in cells] == [256, 512, 1024]


def test_it_ranks_exact_and_lossy_ways_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = advice(tmp_path, *SMALL)
    costs = [1 / row["samples_per_s"] for row in result["rows"]]
    assert costs == sorted(costs) and len(costs) == 9
    best = {kind: first(result, kind)["series"] for kind in ("exact", "lossy")}
    assert best == {"exact": "overlap", "lossy": "onebit"}
    assert first(result, "exact")["knee"] == 2 and first(result, "exact")["limit"] == "bandwidth"
    always = (
        "the best constant choice (one strategy for every scenario) is `overlap`. Its regret is 0"
    )
    assert result["constant"]["exact"].startswith(always)  # on two and on four ranks
    assert result["constant"]["lossy"] is None  # there is one
    text = capsys.readouterr().out
    answer = "\n".join(text.splitlines()[:5])
    assert "first choice, exact: overlap on 4 ranks, batch 256, " in answer
    assert "first choice, lossy: onebit on 4 ranks, batch 256, " in answer and "samples/s" in answer
    assert len(text.splitlines()) < 40
    assert "onebit: MLP 96.56 (allreduce 96.5, 5 seeds)" in text
    assert "torchrun --nproc-per-node 4 -m lab.train strategy=overlap batch_size=256" in text
    assert (tmp_path / "advice.png").stat().st_size > 10_000
    drawing = chart(result)
    best = "exact: overlap on 4 ranks, batch 256; lossy: onebit on 4 ranks, batch 256"
    assert drawing.message == f"Predicted best for throughput, {best}"
    assert overlapping(drawn(drawing.spec(), "svg").decode()) == []


def test_it_says_that_a_profile_is_an_estimate(tmp_path: Path) -> None:
    (tmp_path / "profile").mkdir()
    guess = replace(profile_of("vgg16_p100"), name="guess", source="estimate: counted operations")
    (tmp_path / "profile/guess.yaml").write_text(guess.to_yaml())
    small = ["strategy=tree", "batch_size=64", "world_size=2", "profile=guess"]
    assert "predicted: profile guess (an estimate), hardware titanx_x4" in said(
        command.main, *small, "--config-dir", str(tmp_path)
    )


def test_what_other_settings_change_is_said_and_no_accuracy_of_the_default() -> None:
    small = ["batch_size=256", "world_size=2", "strategy=onebit", "profile=vgg16_p100"]
    usual = said(command.main, *small)
    assert "optim=" not in usual and "  onebit: MLP 96.56" in usual
    other = said(command.main, *small, "codec=topk", "optim=adamw")
    assert "\noptim=torch.optim.AdamW: an update makes 7 passes over memory" in other
    assert "  onebit: not recorded" in other


def test_ranks_that_exchange_nothing_are_no_advice() -> None:
    text = said(command.main, "strategy=none,tree", "batch_size=64", "world_size=2")
    assert "first choice, exact: tree on 2 ranks" in text and "none on" not in text
    line = refusal(command.main, "strategy=none", "batch_size=64", "world_size=2")
    assert line.startswith("strategy=none: its ranks exchange nothing")


def test_it_says_what_a_profile_leaves_without_effect() -> None:
    small = ["strategy=tree", "batch_size=64", "world_size=2"]
    line = "no effect on these steps: precision=fp16, cluster=emulated"
    assert line in said(command.main, *small, "precision=fp16", "cluster=emulated")
    assert "no effect" not in said(command.main, *small)


def test_it_says_when_to_measure_first() -> None:
    alike = ["strategy=overlap,layerwise,tree", "batch_size=256", "world_size=4"]
    lines = said(command.main, *alike).splitlines()
    assert lines[1].strip().startswith("measure first")
    assert lines[1].endswith("cannot distinguish this choice from layerwise")
    place = lines.index("to run:")
    assert [line.split()[5] for line in lines[place + 1 : place + 3]] == [
        "strategy=overlap",
        "strategy=layerwise",
    ]
    assert "measure first" not in said(command.main, "strategy=overlap,tree", *alike[1:])


def test_a_target_decides_between_ranks(tmp_path: Path) -> None:
    exact = ["strategy=overlap", *SMALL[1:]]
    fast = first(advice(tmp_path, *exact, "target=hours", "samples=1e6", "epochs=2"), "exact")
    assert fast["world_size"] == 4
    assert fast["hours"] == pytest.approx(2e6 / fast["samples_per_s"] / 3600)
    efficient = first(advice(tmp_path, *exact, "target=efficiency>=0.8"), "exact")
    assert efficient["world_size"] == 2 and efficient["efficiency"] >= 0.8
    cheap = first(advice(tmp_path, *exact, "target=cost", "price_per_hour=3.6"), "exact")
    assert cheap["world_size"] == 1
    assert cheap["cost"] == pytest.approx(1e6 * 0.001 / cheap["samples_per_s"])
    settings = [*exact, "target=cost", "price_per_hour=3.6", "price_of=node"]
    assert first(advice(tmp_path, *settings), "exact")["world_size"] == 4


def test_an_efficiency_that_nothing_reaches_is_said() -> None:
    settings = ["strategy=tree", "batch_size=64", "world_size=4", "target=efficiency>=0.9"]
    assert "no option reaches efficiency>=0.9; the highest is 0." in said(command.main, *settings)


def test_an_option_must_fit_the_memory(tmp_path: Path) -> None:
    result = advice(tmp_path, *SMALL, "hardware.memory_bytes=8e8")
    assert {row["series"] for row in result["rows"]} == {"overlap"}
    assert result["too_large"] == ["allreduce", "onebit"]
    assert "no option fits the memory of titanx_x4" in said(
        command.main, *SMALL, "hardware.memory_bytes=1e6", f"out={tmp_path}/none.json"
    )
    assert not (tmp_path / "none.png").exists()


def test_accumulation_is_an_option(tmp_path: Path) -> None:
    result = advice(
        tmp_path, "profile=resnet50_p100", "hardware=eth10g", "strategy=allreduce",
        "batch_size=256", "world_size=4", "accumulate=1,4",
    )  # fmt: skip
    once, four = result["rows"]
    assert [row["accumulate"] for row in (once, four)] == [1, 4]
    assert four["step_s"] == pytest.approx(once["step_s"] + 3 * 36e-3, rel=0.02)


@pytest.mark.parametrize(
    "settings",
    [
        ("hardware=eth10g", "batch_size=8", "strategy=tree,topk", "profile=vgg16_p100",
         "profile.bytes_scale=0.5"),
        ("cluster=emulated", "hardware=emulated_1gbit", "batch_size=4", "strategy=tree,diloco",
         "model=replay", "profile=vgg16_p100"),
        ("comm=horovod", "strategy=allreduce", "batch_size=4", "exchange.dtype=bfloat16",
         "epochs=2"),
    ],
)  # fmt: skip
def test_every_command_is_accepted_by_train(tmp_path: Path, settings: tuple[str, ...]) -> None:
    for row in advice(tmp_path, *settings)["rows"]:
        launcher, _, words = row["command"].partition(" -m lab.train ")
        config = load(shlex.split(words))
        check_batch(config, row["world_size"])
        assert (config.strategy, config.batch_size) == (row["strategy"], row["batch_size"])
        if "cluster=emulated" in settings:
            assert launcher == "python" and config.cluster.hosts == row["world_size"]
        elif "comm=horovod" in settings:
            assert launcher == f"horovodrun -np {row['world_size']} python"
        else:
            assert ("--nnodes" in launcher) == (row["world_size"] > 4)


def test_it_predicts_on_what_a_study_measured(tmp_path: Path) -> None:
    profile = replace(profile_of("alexnet_titanx"), bytes_scale=0.02)
    study = tmp_path / "study"
    for rate, links in (("1gbit", TRUE), ("300mbit", with_rate(TRUE, 3e7))):
        hosts = ("cluster=emulated", f"cluster.rate={rate}")
        leave_study(study, profile, ("none", "allreduce", "overlap"), links, *hosts, sizes=(1, 2))
    small = ["strategy=allreduce,overlap", "batch_size=128", "world_size=4", f"fit={study}"]
    small += ["profile=alexnet_titanx", "profile.bytes_scale=0.02"]
    small += ["hardware=emulated_1gbit", "cluster=emulated"]
    hardware = advice(tmp_path, *small, "cluster.rate=300mbit")["hardware"]
    assert hardware["conditions"] == "cluster.rate=300mbit"
    assert hardware["inter"]["bandwidth_bytes_per_s"] == pytest.approx(3e7, rel=0.05)
    line = refusal(command.main, *small, "cluster.rate=10mbit")
    assert "add the settings of one of them: cluster.rate=1gbit; cluster.rate=300mbit" in line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["target=speed"], "target=speed: no such target; allowed: throughput, hours"),
        (["target=efficiency"], "target=efficiency: needs a bound, quoted for the shell"),
        (["target=efficiency>=80"], "efficiency must be above 0 and at most 1"),
        (["target=efficiency>=most"], "efficiency must be above 0 and at most 1"),
        (["target=hours", *SMALL], "target=hours: needs samples="),
        (["target=hours", "epochs=3", *SMALL], "target=hours epochs=3: needs samples="),
        (["target=cost", *SMALL], "target=cost: needs price_per_hour="),
        (["price_per_hour=free", *SMALL], "price_per_hour=free: must be a number above 0"),
        (["price_of=rack", *SMALL], "price_of=rack: allowed: device, node"),
        (["samples=0", *SMALL], "samples=0: must be a number above 0"),
        (["world_size=0"], "world_size=0: must be an integer from 1 to 1000000"),
        (["knee=3", *SMALL], "knee=3: must be a number from 1 to 2"),
        (["top=0", *SMALL], "top=0: must be an integer of at least 1"),
        (["compile=true", *SMALL], "compile=true: has no effect on a prediction; give a trace"),
        (["trace=a.json", *SMALL], "trace=a.json has no effect in lab.advise; use"),
        (["out=a.csv", *SMALL], "out=a.csv: must name FILE.json or FILE.png"),
        (["batch=32"], "batch=32: no such setting"),
        (["hardware=abacus"], "hardware=abacus: allowed:"),
        (["world_size=8", *SMALL[:2]], "world_size=8: hardware=titanx_x4 has a single"),
        (["strategy=ddp", "batch_size=64"], "strategy=ddp: DDPSync has its own schedule"),
    ],
)
def test_a_wrong_setting_is_one_line(words: list[str], message: str) -> None:
    assert message in refusal(command.main, *words)


def test_missing_samples_are_refused_before_all_strategies_are_composed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(request, "_strategies", lambda _: pytest.fail("this takes seconds"))
    line = refusal(command.main, "target=hours", "hardware=eth10g", "world_size=4", "model=mlp")
    assert "target=hours: needs samples=" in line


def test_an_option_has_the_interval_of_its_prediction(tmp_path: Path) -> None:
    words = ["profile=resnet50_p100", "hardware=eth25g", "world_size=8", "batch_size=512"]
    (row,) = advice(tmp_path, *words, "strategy=overlap")["rows"]
    result, _ = predicted(predict.read([*words, "strategy=overlap"]))
    assert row["step_s_interval"] == pytest.approx(result["rows"][0]["step_s_interval"])
