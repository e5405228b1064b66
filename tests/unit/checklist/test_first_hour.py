"""lab.first_hour: its page, exit codes and processes."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from lab import first_hour
from lab.checklist import check, hardware, item, page
from lab.checklist.figures import Results
from lab.checklist.item import Command
from tests.unit.checklist.test_checklist import leaves, running

FOUND: dict[str, Any] = {
    **{"usable": True, "torch": "torch 2 (built for CUDA 13.0)", "num_listed": 1, "num_mig": 0},
    **{"driver": 580, "driver_is_new_enough": True, "max_sm_mhz": 1980.0, "compiler": True},
    **{"python_header": True, "memory_gb_per_s": 4900.0},
    "environment": {
        **{"gpus": ["NVIDIA H200"], "cpu": "a CPU", "num_cores": 16, "torch": "2.13.0"},
        "gpu_links": "     GPU0 GPU1\nGPU0  X  NV18\nGPU1  NV18 X\n",
    },
    "git_commit": {"commit": "abc", "dirty": False},
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(first_hour, "query", lambda: FOUND)
    return tmp_path


def test_parts_add_up_on_one_page(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(first_hour, "run", running(leaves(out="3 passed"), code=0))
    assert first_hour.main(["items=3a,10"]) == 0
    assert first_hour.main(["items=1"]) == 0
    shown = capsys.readouterr().out
    assert "driver" in shown and "expected 1: holds" in shown
    text = (here / "docs/results/gpu-h200.md").read_text()
    assert "| 3a tests: the codec's kernels | passed | 3 tests | at least 1 |" in text
    assert "expected (estimate)" in text and "needs 2 GPUs" in text
    assert "python -m lab.first_hour items=3a,10\npython -m lab.first_hour items=1" in text
    written = json.loads((here / "docs/results/gpu-h200.json").read_text())
    assert [item["key"] for item in written["items"]] == ["1", "3a", "10"]
    assert written["hardware"]["driver"] == 580
    assert (
        "**" not in text
    )  # nothing differs, and an item that needs more GPUs does not count as failed


def test_what_differs_or_fails_is_the_exit_code(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_hour, "run", running(leaves(out="1 failed, 3 passed"), code=1))
    assert first_hour.main(["items=3a", "out=mine.md"]) == 1
    assert "**failed**" in (here / "mine.md").read_text()


def test_an_earlier_page_of_another_commit_is_not_added_to(tmp_path: Path) -> None:
    old_item = {"key": "1", "title": "", "verdict": "holds", "problems": [], "figures": []}
    old = page.result(FOUND, "old", [{**old_item, "commands": []}])
    page.write(tmp_path / "a.md", old)
    new = page.result({**FOUND, "git_commit": {"commit": "def"}}, "new", [])
    assert page.merged(tmp_path / "a.md", new) == new
    assert page.merged(tmp_path / "a.md", {**new, "commit": "abc"})["commands"] == ["old", "new"]


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("item=1", "item=1: allowed are items, time_limit_s, out"),
        ("time_limit_s=0", "time_limit_s=0: must be an integer of at least 1"),
        ("out=page.json", "out=page.json: must name FILE.md"),
        ("items=99", "items=99: allowed are 1, 2, 3a"),
    ],
)
def test_wrong_settings_are_one_line(
    argument: str, message: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert first_hour.main([argument]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"lab.first_hour: error: {message}") and error.count("\n") == 1


def test_without_a_gpu_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = json.dumps({**FOUND, "usable": False, "torch": "torch 2 (built without CUDA)"})
    monkeypatch.setattr(item.sys, "executable", "/bin/echo")
    monkeypatch.setattr(item, "ASK", (answer,))
    assert first_hour.main([]) == 2
    wanted = "no GPU that torch 2 (built without CUDA) can use; nvidia-smi lists 1\n"
    assert capsys.readouterr().err == f"lab.first_hour: error: {wanted}"


def test_the_machine_is_asked_for_what_the_checklist_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listed = [
        {"driver": "570.65.06", "mig": mig, "max_sm_clock_mhz": clock}
        for mig, clock in (("Disabled", 1980.0), ("Enabled", None))
    ]
    monkeypatch.setattr(hardware, "gpus", lambda: listed)
    monkeypatch.setattr(hardware, "environment", lambda _: {})
    for cuda, new_enough in (("13.0", False), ("12.8", True), (None, True)):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        found = hardware.hardware()
        assert (found["driver"], found["driver_is_new_enough"]) == (570, new_enough)
    assert (found["num_listed"], found["num_mig"], found["max_sm_mhz"]) == (2, 1, 1980)


def test_a_page_is_named_after_its_gpus() -> None:
    def path(*gpus: str) -> str:
        return str(item.machine_of({**FOUND, "environment": {"gpus": gpus}}, None)[1])

    assert path("NVIDIA H200") == "docs/results/gpu-h200.md"
    assert path(*["NVIDIA GeForce RTX 4090"] * 2) == "docs/results/gpu-2-rtx-4090.md"


TICKS = "import time\nfor i in range(1000):\n    print(i, flush=True)\n    time.sleep(0.05)"


def test_a_command_that_takes_too_long_is_ended_with_all_it_started(tmp_path: Path) -> None:
    found = check.run(
        Command("late", shlex.join(["-SEc", f"import os\nos.fork()\n{TICKS}"])),
        Results(tmp_path),
        6.0,
    )
    assert found["code"] is None and found["num_left"] == 1
    assert Results(tmp_path).ended("late") == found
    again = check.run(Command("late", """-c "print('once')" """), Results(tmp_path), 20.0)
    assert (again["code"], again["num_left"]) == (0, 0)
    assert Results(tmp_path).output("late") == "once\n"


def test_a_rank_is_stopped_as_a_lost_one_would_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "POLL_S", 0.1)
    monkeypatch.setattr(check, "STOP_S", 0.2)
    command = Command(
        "hang", shlex.join(["-SEc", TICKS]), stop_rank_after_s=4, environment={"RANK": "1"}
    )
    assert check.run(command, Results(tmp_path), 8)["code"] is None
    assert 0 < len(Results(tmp_path).output("hang").splitlines()) < 120  # of 160 if it went on
