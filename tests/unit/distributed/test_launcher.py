"""What launchers set: places, nodes, jobs and signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from lab import bench, train
from lab.distributed import launcher
from lab.distributed.comm import Comm, run_ranks
from lab.distributed.launcher import nodes_of
from tests.support import HANG_S
from tests.support.commands import refusal

WAITS_IN_A_LIBRARY = """
import ctypes
from lab.distributed.launcher import end_on_signals
end_on_signals("lab.train")
ctypes.CDLL(None).system(b"echo waits; exec sleep 60")  # waits on after a signal
"""


def test_a_rank_that_waits_in_a_library_ends_at_a_signal() -> None:
    line = [sys.executable, "-c", WAITS_IN_A_LIBRARY]
    with subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as rank:
        assert rank.stdout and rank.stderr
        assert rank.stdout.readline() == "waits\n"
        try:
            rank.send_signal(signal.SIGUSR1)
            assert rank.wait(HANG_S) == 1
        finally:
            os.killpg(rank.pid, signal.SIGKILL)
        said = "lab.train: error: stopped by SIGUSR1 before the run had begun\n"
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
    command: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = list[float]()
    monkeypatch.setattr(launcher.time, "sleep", waits.append)
    monkeypatch.setenv("RANK", "1")
    assert refusal(command.main, "no=setting")
    assert waits == [launcher.REPORT_S]


@pytest.mark.parametrize(
    ("command", "words", "variable", "value"),
    [
        (train, ["steps=1"], "WORLD_SIZE", "2"),
        (train, ["steps=1"], "LAB_EMULATION", "1"),
        (bench, ["footprint"], "LAB_BENCH_ANSWER", "answer.json"),
    ],
)
def test_variables_that_a_launcher_or_the_lab_would_set_are_checked(
    command: ModuleType,
    words: list[str],
    variable: str,
    value: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(variable, value)
    assert refusal(command.main, *words).startswith(f"{variable}={value}: ")


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
            lambda: comm.iall_to_all(torch.zeros(4, 100), tensor).wait(),
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


OMPI: dict[str, str] = dict(zip(launcher.FOREIGN["mpirun"], ("3", "4", "1", "2"), strict=True))
SRUN: dict[str, str] = dict(zip(launcher.FOREIGN["srun"], ("3", "4", "1", "1,3"), strict=True))
TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str]], tuple[str | None, ...]]:
    """Return a function that adopts a rank with these variables, and returns torch's."""
    others = [name for own in launcher.FOREIGN.values() for name in own]
    for name in (*TORCH, *others, *launcher.OF_JOB, "SLURM_NODEID", "HOROVOD_RANK"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)

    def adopt(variables: dict[str, str]) -> tuple[str | None, ...]:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        launcher.adopt()
        return tuple(map(os.environ.get, TORCH))

    return adopt


Started = Callable[[dict[str, str]], tuple[str | None, ...]]


def test_ranks_of_mpirun_on_one_host_meet_where_their_job_says(started: Started) -> None:
    *place, address, port = started(OMPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"})
    assert (place, address) == (["3", "4", "1", "4"], "127.0.0.1")
    assert not launcher.is_first_rank()
    assert port and 20000 <= int(port) < 32000
    assert launcher.started_by() == "mpirun"


def test_on_several_hosts_the_first_has_to_be_named(started: Started) -> None:
    with pytest.raises(ValueError, match="MASTER_ADDR=: mpirun started ranks on several hosts"):
        started(OMPI)
    assert not launcher.is_first_rank()  # so that the line is printed once
    assert started({"MASTER_ADDR": "a", "MASTER_PORT": "9"})[-2:] == ("a", "9")


@pytest.mark.parametrize(
    ("nodes", "first"), [("gpu[03-05,9]", "gpu03"), ("a,b", "a"), ("n[1,2].local", "n1.local")]
)
def test_srun_names_the_first_host_and_the_tasks_of_each(
    started: Started, nodes: str, first: str
) -> None:
    *place, address, _ = started(SRUN | {"SLURM_STEP_NODELIST": nodes, "SLURM_NODEID": "1"})
    assert (place, address) == (["3", "4", "1", "3"], first)


@pytest.mark.parametrize(
    ("per_node", "node", "tasks"), [("4(x2),3", "1", "4"), ("4(x2),3", "2", "3")]
)
def test_counts_of_srun_are_repeated(
    started: Started, per_node: str, node: str, tasks: str
) -> None:
    own = {"SLURM_STEP_TASKS_PER_NODE": per_node, "SLURM_NODEID": node, "SLURM_STEP_NODELIST": "a"}
    assert started(SRUN | {"SLURM_STEP_NUM_TASKS": "11"} | own)[3] == tasks


@pytest.mark.parametrize(
    "more", [{"RANK": "0"}, {"HOROVOD_RANK": "0"}, {"SLURM_STEP_NUM_TASKS": "1"}]
)
def test_ranks_of_others_and_a_step_of_one_task_stay_what_they_are(
    started: Started, more: dict[str, str]
) -> None:
    assert started(SRUN | more)[1:] == (None,) * 5
