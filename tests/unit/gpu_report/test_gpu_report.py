"""The report of a GPU, on a CPU that pretends: budget, bounds, a JSON that goes on, and a page."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from lab.benchmarks.request import read
from lab.gpu_report import __main__ as command
from lab.gpu_report import measuring, page, run
from lab.gpu_report.items import SMALL, BoundedFigure, Item, ReportSizes, chosen, items_of
from lab.settings.errors import ConfigError
from tests.support.commands import refusal, said
from tests.support.slow import some_of

WORDS = ("codec", "codec=[onebit]", "num_values=256", "columns=64", "device=cpu", "rounds=1")


def figure(result: dict[str, Any]) -> Iterator[BoundedFigure]:
    yield BoundedFigure("rate", result["rate"], "GB/s", low=2.0)


def item(key: str, seconds: float = 10) -> Item:
    return Item(key, f"about {key}", seconds, "bench", WORDS, figure, draws=False)


class Machine:
    """Takes items as `ends` says, each in 10 s of its own clock."""

    def __init__(self, path: Path, **ends: float | Exception) -> None:
        self.path, self.ends, self.now_s = path, ends, 0.0
        self.taken, self.said = list[str](), StringIO()
        self.seen = list[list[str]]()  # what the file had when an item began

    def take(self, one: Item, _pretended: bool) -> dict[str, Any]:
        self.taken.append(one.key)
        self.seen.append([each["status"] for each in read_items(self.path).values()])
        self.now_s += 10
        end = self.ends.get(one.key, 3.0)
        if isinstance(end, Exception):
            raise end
        return {"benches": [], "rate": end}

    def measure(self, report: run.Report, items: list[Item], budget_s: float) -> bool:
        clock = SimpleNamespace(monotonic=lambda: self.now_s)
        with patch.object(run, "time", clock), redirect_stdout(self.said):
            return run.measure(items, report, self.path, budget_s, self.take)


def read_items(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())["items"]


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(run.gc, "collect", lambda: 0)  # takes most of an item's time
    return tmp_path / "gpu.json"


def test_what_fails_or_is_missing_leaves_its_line_and_the_rest_goes_on(path: Path) -> None:
    machine = Machine(path, a=1.5, b=ConfigError("graph=true: no such setting"), c=KeyError("x"))
    report = run.begun(path, "python", pretended=True)
    assert machine.measure(report, [item(key) for key in "abcd"], 100)
    found = read_items(path)
    assert [found[key]["status"] for key in "abcd"] == ["done", "not available", "failed", "done"]
    assert found["b"]["line"] == "graph=true: no such setting"
    assert found["c"]["line"] == "KeyError: 'x'" and "KeyError" in found["c"]["traceback"]
    # The file is whole before each item, and says which one runs, as the process may end in it.
    assert machine.seen[0] == ["failed"] and machine.seen[3] == [
        *("done", "not available", "failed", "failed")
    ]
    said = machine.said.getvalue()
    assert "rate: 1.5 GB/s (pretended)  (at least 2: missed by 0.5)" in said
    assert "rate: 3 GB/s (pretended)  (at least 2: met)" in said
    assert "[2/4] b: about b; 90 s left" in said


def test_an_item_that_does_not_fit_is_skipped_and_a_shorter_one_is_not(path: Path) -> None:
    machine, report = Machine(path), run.begun(path, "python", pretended=True)
    machine.measure(report, [item("a"), item("long", 60), item("b")], 45)
    assert machine.taken == ["a", "b"]
    assert read_items(path)["long"] | {"commit": 0} == {
        "about": "about long",
        "commit": 0,
        "status": "skipped",
        "line": "takes about 60 s, but only 35 of 45 s were left",
    }


def test_another_start_measures_what_is_missing_and_last_what_failed(path: Path) -> None:
    items = [item(key) for key in "abcd"]
    machine = Machine(path, b=ValueError("b"), c=ConfigError("c"))
    machine.measure(run.begun(path, "first", pretended=True), items[:3], 100)
    report = run.begun(path, "second", pretended=True)
    assert report["commands"] == ["first", "second"]
    assert [each.key for each in run.left(items, report, again=False)] == ["d", "c", "b"]
    assert [each.key for each in run.left(items, report, again=True)] == ["d", "a", "c", "b"]
    machine.measure(report, [items[1]], 5)  # too little for it: its error stays
    assert read_items(path)["b"]["line"] == "ValueError: b"


def test_a_lost_gpu_ends_the_process_s_part(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch, "rand", lost)
    machine = Machine(path, b=RuntimeError("CUDA error"))
    report = run.begun(path, "python", pretended=True)
    assert not machine.measure(report, [item(key) for key in "abc"], 100)
    assert machine.taken == ["a", "b"] and list(read_items(path)) == ["a", "b"]


def test_an_item_that_hangs_ends_the_process(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = list[Any]()
    watch = SimpleNamespace(
        dump_traceback_later=lambda seconds, exit: limits.append((seconds, exit)),
        cancel_dump_traceback_later=lambda: limits.append("ended"),
    )
    monkeypatch.setattr(run, "faulthandler", watch)
    machine, report = Machine(path, a=KeyError("a")), run.begun(path, "python", pretended=True)
    machine.measure(report | {"pretended": False}, [item("a", 20)], 100)
    assert limits == [(120, True), "ended"]


def test_a_file_of_another_machine_or_of_no_report_is_refused(path: Path) -> None:
    path.write_text('{"kind": "other"}')
    with pytest.raises(ConfigError, match=r"out=.*: not a report of lab.gpu_report"):
        run.begun(path, "python", pretended=True)
    report = run.begun(path.with_name("new.json"), "python", pretended=True)
    path.write_text(json.dumps(report | {"environment": {"gpus": ["NVIDIA H100"]}}))
    with pytest.raises(ConfigError, match=r"has gpus=\['NVIDIA H100'\], but this run has"):
        run.begun(path, "python", pretended=True)
    path.write_text("{")
    with pytest.raises(ConfigError, match="page=.*: cannot be read"):
        run.opened("page", path)


def test_without_a_gpu_one_line_says_what_to_do(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert refusal(command.main, f"out={path}") and not path.exists()
    assert "items=nope: no such item; allowed: steps-alexnet-32, " in refusal(
        command.main, "items=nope"
    )


@pytest.mark.parametrize(
    ("bounds", "value", "verdict"),
    [
        ({"low": 0.8}, 0.8, "met"),
        ({"high": 1.5}, 2.0, "missed by 0.5"),
        ({"high": 1.5}, None, "not known"),
        ({}, 2.0, ""),
    ],
)
def test_a_figure_meets_its_bound_or_misses_it(
    bounds: dict[str, float], value: float | None, verdict: str
) -> None:
    assert BoundedFigure("", value, "ms", **bounds).verdict == verdict


def steps_result() -> dict[str, Any]:
    times = {"none": 5.0, "overlap": 5.2, "onebit": 8.0, "int8": 9.0, "powersgd": 6.0, "ddp": 5.1}
    rows = [{"name": name, "step_s": {"median": 1e-3 * ms}} for name, ms in times.items()]
    kernels_s = {"none": 4e-3, "onebit": 5.5e-3, "int8": 6e-3, "powersgd": 4e-3}
    return {"benches": [{"rows": rows}], "kernels_s": kernels_s}


def test_steps_are_held_to_their_kernels_and_to_ddp() -> None:
    by_key = {one.key: one for one in items_of(ReportSizes(pretended=False))}
    said = {
        each.name: (each.value and round(each.value, 3), each.verdict)
        for each in by_key["steps-alexnet-32"].figures(steps_result())
    }
    assert said["overlap / ddp"] == (1.02, "missed by 0.0196")
    assert said["onebit - none"] == (3.0, "")
    assert said["onebit - none / its kernels"] == (2.0, "missed by 0.5")
    assert said["powersgd - none / its kernels"] == (None, "")
    large = by_key["steps-alexnet-256"].figures(steps_result())
    assert [each.name for each in large if each.bound] == ["overlap / ddp"]


@pytest.mark.parametrize("pretended", some_of([False, True], also=[False]))
def test_every_item_is_a_command_line_of_the_lab(pretended: bool) -> None:
    items = items_of(ReportSizes(pretended))
    assert len({one.key for one in items}) == len(items) > 35
    assert sum(one.seconds for one in items) < 15 * 60
    assert {one.kind for one in items} == set(measuring.KINDS)
    seen = set[tuple[str, ...]]()  # each model, and each benchmark with its own settings, once
    for one in items:
        model = tuple(word for word in one.words if word.startswith(("model", "task")))
        others = (word for word in one.words if not word.startswith(("data", "batch_size")))
        own = one.kind, *(word for word in others if word not in model)
        if {model, own} <= seen:
            continue
        seen |= {model, own}
        of_run = {"steps": "step", "graphs": "step", "copies": "throughput", "counters": "layers"}
        words = [word for word in one.words if word != "strategy=none"]
        more = ["strategy=none,ddp"] if of_run.get(one.kind) == "step" else []
        request = read([*([of_run[one.kind]] if one.kind in of_run else []), *words, *more])
        assert {each.config.device for each in request.variants} == {"cpu" if pretended else "cuda"}
    assert len(chosen(items, ["steps-", "codecs-64"])) == len(SMALL) + 2


def test_a_pretended_report_says_so_at_its_top_and_at_each_number(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ["pretend=true", "items=steps-alexnet-32,graph-alexnet,codecs-64,mfu-gpt2-fp32,copies"]
    told = said(command.main, *asked, f"out={path}")
    text = path.with_suffix(".md").read_text()
    assert text.splitlines()[2].startswith("**Pretended: a CPU ran this report")
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| codecs-64 | ")]
    assert len(rows) > 8 and all(row[2].endswith("(pretended)") for row in rows)
    assert "## Steps (pretended)" in text and "emulated: a GPU, on a CPU at tiny sizes" in text
    assert "copies | not available | trace=" in text  # a CPU makes none
    assert f"wrote {path.with_suffix('.md')}" in told
    assert (path.with_suffix("") / "steps-alexnet-32.png").exists()
    found = read_items(path)
    assert found["steps-alexnet-32"]["result"]["kernels_s"].keys() == set(measuring.COUNTED)
    assert {each["name"] for each in found["mfu-gpt2-fp32"]["figures"]} == {
        *("Transformer at 4", "Transformer, share of the peak")
    }

    monkeypatch.setitem(sys.modules, "altair", None)  # as on a machine that only measures
    lines = page.write(path.with_suffix(".md"), run.opened("page", path))
    draws = f"python -m lab.gpu_report page={path} draws them on another machine"
    assert lines[1] == f"without figures, because altair is missing: {draws}"
    bare = path.with_suffix(".md").read_text()
    assert draws in bare and "![" in text and "![" not in bare
