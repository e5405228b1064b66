"""What launchers set: places, nodes, jobs and signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from types import ModuleType

import pytest
import torch

from lab import bench, train
from lab.distributed import launcher
from lab.distributed.comm import Comm, run_ranks
from lab.distributed.launcher import nodes_of
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


BLOCKS, TURNS, UNEVEN = [[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 1], [2, 3, 4], [5]]


@pytest.mark.parametrize("nodes", [BLOCKS, TURNS, UNEVEN, [[0, 3, 5], [1, 4], [2]]])
def test_places_tell_which_ranks_share_a_node(nodes: list[list[int]]) -> None:
    at = {rank: (node.index(rank), len(node)) for node in nodes for rank in node}
    assert nodes_of([at[rank] for rank in sorted(at)]) == nodes


@pytest.mark.parametrize("places", [[(0, 2), (0, 2)], [(0, 1), (1, 2)], [(1, 2), (0, 1)]])
def test_places_that_do_not_fit_are_refused(places: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match=r"LOCAL_RANK of LOCAL_WORLD_SIZE: the 2 ranks have "):
        nodes_of(places)


def test_groups_know_their_nodes() -> None:
    def rank_main(comm: Comm) -> list[list[int]]:
        return [list(node) for node in comm.split(comm.rank % 2).nodes]

    assert run_ranks(6, rank_main, UNEVEN) == [[[0], [1, 2]], [[0], [1], [2]]] * 3


def test_bytes_to_other_nodes_are_those_that_leave_along_each_path() -> None:
    def rank_main(comm: Comm) -> list[int]:
        tensor, counts = torch.zeros(4, 100), []
        for run in (
            lambda: comm.all_reduce(tensor),
            lambda: comm.all_to_all(torch.zeros(4, 100), tensor),
            lambda: comm.isend_irecv(
                [(tensor, (comm.rank + 2) % 4)], [(tensor.clone(), (comm.rank + 2) % 4)]
            ).wait(),
        ):
            before = comm.traffic.across_bytes
            run()
            counts.append(comm.traffic.across_bytes - before)
        return counts

    ring, pairs, whole = 1600 * 3 // 2, 400 * 2, 1600
    # Around the ring, each node is left once.
    inside, leaving = [0, pairs, whole], [ring, pairs, whole]
    assert run_ranks(4, rank_main, BLOCKS) == [inside, leaving] * 2
    assert run_ranks(4, rank_main, TURNS) == [[ring, pairs, 0]] * 4
