"""How ranks end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from types import ModuleType

import pytest

from lab import bench, train
from lab.distributed import launcher
from tests.support import HANG_S

WAITS_IN_A_LIBRARY = """
import ctypes
from lab.distributed.launcher import end_on_signals
end_on_signals("lab.train")
ctypes.CDLL(None).system(b"echo waits; exec sleep 60")  # waits on after a signal
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_rank_that_waits_in_a_library_ends_at_a_signal(number: signal.Signals) -> None:
    line = [sys.executable, "-c", WAITS_IN_A_LIBRARY]
    with subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as rank:
        assert rank.stdout and rank.stderr
        assert rank.stdout.readline() == "waits\n"
        try:
            rank.send_signal(number)
            assert rank.wait(HANG_S) == 1
        finally:
            os.killpg(rank.pid, signal.SIGKILL)
        said = f"lab.train: error: stopped by {number.name} before the run had begun\n"
        assert rank.stderr.read() == said


HAS_A_LONG_END = """
import atexit
from lab.distributed.launcher import run_as_process
class Part:
    def __del__(self):
        print("torn down")
part = Part()
def main(arguments):
    atexit.register(print, "a handler of", *arguments)
    return 75
run_as_process(main)
"""


@pytest.mark.parametrize("profiled", [False, True])
def test_a_command_ends_without_pythons_teardown(profiled: bool) -> None:
    session = {"NSYS_PROFILING_SESSION_ID": "1"} if profiled else {}
    line = [sys.executable, "-c", HAS_A_LONG_END, "main"]
    ended = subprocess.run(line, capture_output=True, text=True, env={**os.environ, **session})
    assert ended.returncode == 75, ended.stderr
    assert ended.stdout.splitlines() == ["a handler of main"] + ["torn down"] * profiled


@pytest.mark.parametrize("command", [train, bench])
def test_where_the_first_rank_is_silent_another_reports(
    command: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waits = list[float]()
    monkeypatch.setattr(launcher.time, "sleep", waits.append)
    monkeypatch.setenv("RANK", "1")
    assert command.main(["no=setting"]) == 2
    assert waits == [launcher.REPORT_S]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{command.__name__}: error: ")
