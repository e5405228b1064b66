"""The checklist of a first hour on GPUs: its commands, its figures, its page. No GPU is needed."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lab import plot
from lab.benchmarks import request
from lab.checklist import check, item, page
from lab.checklist.figures import Results, reader
from lab.checklist.item import Command, Figure, Item, Machine
from lab.device import profile_request
from lab.device.profile import KERNELS
from lab.measure.spans import Span
from lab.record.trace import write_trace
from lab.settings.command import read
from lab.settings.config import check_batch, load
from lab.settings.fields import own_settings
from lab.study import grid
from tests.conftest import ROOT
from tests.unit.benchmarks.test_bench import results as bench_results


def items(num_gpus: int, folder: Path = Path("docs/results")) -> list[Item]:
    return item.checklist(Machine(("NVIDIA H200",) * num_gpus, folder, 4900.0))


GOOD = {"name": "a", "read": "7", "why": "", "equals": 1}
COMMANDS = [command for item in items(8) for command in item.commands]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda one: one.name)
def test_every_command_is_one_that_the_lab_accepts(command: Command) -> None:
    _, module, *given = command.words
    if command.words[0] == "-W":
        module, code = "lab.train", command.words[3]
        compile(code, "words", "exec")
        given = ast.literal_eval(re.findall(r"main\((\[.*?\])\)", code)[0])
    others = [each for each in given if not each.startswith("out=docs/results/")]
    if module == "lab.train":
        config = load(given)
        check_batch(config, max(command.num_ranks, 1))
        assert command.num_ranks < 3 or config.scaling == "weak"  # batches fit any number of GPUs
        assert f"cell={command.name}" in given  # the path of its record
    elif module == "lab.bench":
        request.read(others)
    elif module == "lab.sweep":
        grid.read(given)
    elif module == "lab.profile_layers":
        profile_request.read(others)
    elif module == "lab.plot":
        assert own_settings(plot.Settings, read(plot.COMMAND, given).settings)
    else:
        assert module == "pytest" and (ROOT / given[0]).exists()


def test_numbers_and_needs_are_those_of_the_checklist() -> None:
    keys = [item.key for item in items(8)]
    assert keys[:3] == ["1", "2", "3a"] and keys[-2:] == ["15a", "15b"]
    assert len(set(keys)) == len(keys)
    needs = {
        int(re.sub(r"\D", "", item.key)): item.num_gpus for item in items(8) if item.key != "3f"
    }
    assert needs == {n: 1 if n < 10 else 2 for n in range(1, 16)}
    names = [command.name for command in COMMANDS]
    assert len(set(names)) == len(names)  # each writes separate files


def test_itemare_chosen_by_number_or_part() -> None:
    def keys(*chosen: str) -> list[str]:
        return [item.key for item in check.chosen(items(1), list(chosen))]

    assert keys("6", "4b") == ["4b", "6a", "6b", "6c"]
    with pytest.raises(check.ConfigError, match="items=16: allowed are 1, 2, 3a"):
        keys("16")


Answer = Callable[[Command, Results], None]


def running(answer: Answer, code: int | None = 0) -> check.Run:
    """Run nothing: `answer` writes the files that the command would."""

    def run(command: Command, results: Results, _limit_s: float) -> dict[str, Any]:
        answer(command, results)
        ended = {"code": code, "seconds": 75.0, "num_left": 0, "on_one_gpu": 2}
        (results.folder / f"{command.name}.ended.json").write_text(json.dumps(ended))
        return ended

    return run


def leaves(**files: object) -> Answer:
    """Return an `answer` for any command: `json` and `out` by its name, `record` of a run."""

    def answer(command: Command, results: Results) -> None:
        for ending, content in files.items():
            text = content if isinstance(content, str) else json.dumps(content)
            path = results.folder / f"{command.name}.{ending}"
            if ending == "record":
                results.run(command.name).mkdir(parents=True)
                path = results.run(command.name) / "record.json"
            path.write_text(text)

    return answer


@pytest.fixture
def checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Check one item on the given number of H200; return its verdict and figures."""
    monkeypatch.chdir(tmp_path)

    def run(key: str, answer: Answer, num_gpus: int = 1, code: int | None = 0) -> dict[str, Any]:
        here = Machine(("NVIDIA H200",) * num_gpus, tmp_path, 4900.0)
        (item,) = check.chosen(items(num_gpus, tmp_path), [key])
        done = check.check(item, here, Results(tmp_path), 60, running(answer, code))
        values = {each["name"]: each["value"] for each in done["figures"]}
        return {**done, "values": values}

    return run


def step_rows(**medians_ms: float) -> dict[str, Any]:
    rows = [
        {"name": name, "step_s": {"median": ms / 1e3}, "exposed_exchange_s": {"median": 2e-4}}
        for name, ms in medians_ms.items()
    ]
    return {"rows": [{**row, "exposed_to_ddp": {"median": 1.1}} for row in rows]}


def test_figures_hold_or_differ(checked: Callable[..., dict[str, Any]]) -> None:
    good = checked("6a", leaves(json=step_rows(none=20, overlap=20.2, ddp=20.1, onebit=21)))
    assert good["verdict"] == "holds"
    assert good["values"]["onebit - none"] == pytest.approx(1)
    bad = checked("6a", leaves(json=step_rows(none=20, overlap=24, ddp=20.1, onebit=21)))
    assert bad["verdict"] == "differs" and bad["values"]["overlap / none"] == pytest.approx(1.2)
    assert [each["verdict"] for each in bad["figures"]] == ["differs", "holds", "holds"]


def test_a_failed_command_fails_its_item_and_others_go_on(
    checked: Callable[..., dict[str, Any]],
) -> None:
    failed = checked("9", leaves(), code=1)
    assert failed["verdict"] == "failed"
    assert failed["problems"] == ["memory_1: exit code 1, not 0; see memory_1.out"]
    assert failed["figures"][0]["why"].startswith("cannot be read: FileNotFoundError")
    late = checked("9", leaves(), code=None)
    assert late["problems"] == ["memory_1: ended at time_limit_s=60"]


def test_what_needs_more_gpus_is_not_run(checked: Callable[..., dict[str, Any]]) -> None:
    def never(command: Command, _: Results) -> None:
        raise AssertionError(command)

    found = checked("12a", never)
    assert (found["verdict"], found["problems"]) == ("not applicable", ["needs 2 GPUs"])


def test_figures_are_read_as_the_lab_writes_them(checked: Callable[..., dict[str, Any]]) -> None:
    """The results come from the benchmarks' own code, and the records have the real keys."""
    made = bench_results()
    coded = checked("4a", leaves(json={**made["codec"], "rows": made["codec"]["rows"] * 2}))
    assert coded["values"]["wrong values"] == 0 and coded["values"]["copy"] > 0
    assert coded["values"]["encode"] > 0
    memory = {**made["memory"], "rows": [{**r, "name": "overlap"} for r in made["memory"]["rows"]]}
    assert checked("9", leaves(json=memory))["values"]["overlap / theory"] == 1
    rows = [{**row, "size_bytes": 2**30} for row in made["collective"]["rows"]]
    moved = checked("11a", leaves(json={"rows": rows}), num_gpus=8)
    assert moved["values"]["all-reduce of 1 GiB"] > 0 and moved["values"]["wrong values"] == 0
    steps = {
        "rows": [
            {**row, "name": name}
            for row in made["step"]["rows"][1:2]
            for name in ("none", "overlap", "onebit", "ddp")
        ]
    }
    exposed = checked("12b", leaves(json=steps), num_gpus=8)["values"]["exposed by overlap"]
    assert exposed == pytest.approx(1e3 * made["step"]["rows"][1]["exposed_exchange_s"]["median"])
    flags = {"environment": {"tf32": {"products": False, "convolutions": True}}}
    record = {"status": "done", "backend": "nccl", "device": "cuda", "final": {"accuracy": 0.97}}
    main = checked("2", leaves(record={**record, **flags}))
    assert list(main["values"].values()) == [1, pytest.approx(97), 1]
    assert main["verdict"] == "differs"  # one flag is on


def test_figures_are_read_off_what_commands_print(checked: Callable[..., dict[str, Any]]) -> None:
    tests = checked("3b", leaves(out="=== 1 failed, 27 passed, 2 skipped in 9.1s ===\n"))
    assert tests["values"] == {"failed": 1, "passed": 27, "skipped": 2}

    def waiting(command: Command, results: Results) -> None:
        line = "tensors.py:36: UserWarning: called a synchronizing CUDA operation\n"
        steps = int(command.name.removeprefix("waits_"))
        (results.folder / f"{command.name}.out").write_text((steps + 3) * line)

    assert checked("5", waiting)["values"] == {"host waits": 1}
    line = f"layers 12.000 ms; {KERNELS} 10.000 ms\n"
    layers = checked("7b", leaves(out=line))
    assert layers["values"]["layers / kernels"] == pytest.approx(1.2)
    hung = "lab.train: error: exchange_timeout_s=30: rank 0 waits in AllReduce of b; rank 1 is lost"
    lost = checked("15a", leaves(out=hung), num_gpus=8, code=1)
    assert lost["verdict"] == "holds" and lost["values"]["end after the stop"] == 35
    assert checked("10", leaves(record={}), 2)["figures"][0]["verdict"] == "failed"  # no hardware


def test_a_timeline_says_how_much_backward_hides(checked: Callable[..., dict[str, Any]]) -> None:
    def traced(command: Command, results: Results) -> None:
        if command.name == "timeline":
            leaves(record={"phases_s": {"exchange": 2e-4}})(command, results)
            spans = [Span(0, "backward", "backward", 0, 10), Span(1, "backward", "backward", 9, 11)]
            spans += [Span(0, "exchange", "a", 6, 8), Span(0, "exchange", "b", 9, 11)]
            write_trace(results.run("timeline") / "timeline.json", spans)

    values = checked("14", traced, num_gpus=8)["values"]
    assert values == {"exchange within backward": 0.75, "wait after backward": pytest.approx(0.2)}


def test_scaling_is_that_of_the_studys_table(checked: Callable[..., dict[str, Any]]) -> None:
    def plotted(command: Command, _: Results) -> None:
        if command.name == "plot":
            folder = Path(command.words[-1], "figures")
            folder.mkdir(parents=True)
            lines = (ROOT / "docs/results/demo/summary.csv").read_text().splitlines()
            kept = [one for one in lines if ",32," in one or one.startswith("scaling,")]
            (folder / "summary.csv").write_text("\n".join(kept))

    values = checked("13", plotted, num_gpus=2)["values"]
    assert 0.2 < values["overlap on 2"] < 1.5


def test_a_figure_that_nobody_can_expect_is_noted(tmp_path: Path) -> None:
    figure = Figure("x", "7", "why", "s", low=0, high=1)
    assert check.judge(figure, Results(tmp_path))["verdict"] == "differs"
    assert check.judge(replace(figure, known=False), Results(tmp_path))["verdict"] == "noted"
    (tmp_path / "hardware.json").write_text('{"max_sm_mhz": null}')
    assert check.judge(replace(figure, of=None), Results(tmp_path))["verdict"] == "noted"
    unseen = replace(figure, read="value hardware max_sm_mhz")
    assert check.judge(unseen, Results(tmp_path))["verdict"] == "noted"
    assert (figure.expected(), page.value({"value": None, "unit": "s"})) == ("0 to 1", "- s")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("values hardware num_mig", "could not convert string to float: 'values'"),
        ("value hardware", "value hardware: missing a required argument: 'key'"),
        ("value hardware num_mig unit=s", "got an unexpected keyword argument 'unit'"),
    ],
)
def test_a_figure_that_no_reader_reads_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        reader(text)


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"figures": [{**GOOD, "lows": 1}]}, "Figure has no lows; allowed are name, read, why"),
        ({"figures": [{**GOOD, "low": 1}]}, "a: needs either equals or low"),
        ({"figures": [{**GOOD, "unit": 1}]}, r"items\[0\].figures\[0\].unit=1; must be str"),
        ({"figures": [], "title": "on $machines"}, "no name 'machines'"),
        ({"figures": [], "commands": [{"name": "b"}]}, "python: is missing"),
    ],
)
def test_a_mistake_in_the_file_is_named(
    node: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = {"names": {}, "items": [{"key": "1", "title": "t", **node}]}
    monkeypatch.setattr(item, "read_file", lambda *_: content)
    with pytest.raises(check.ConfigError, match=f"checklist=first_hour: .*{message}"):
        items(1)
