"""Comm: counted bytes, groups, and NCCL's settings."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lab.distributed import torch_comm
from lab.distributed.comm import Comm, run_ranks
from lab.distributed.launcher import RankInfo
from lab.distributed.torch_comm import TWO_WAY_BYTES, TorchComm
from lab.settings.config import build, load
from tests.support import refusing
from tests.support.ranks import CREW, join


def collectives(comm: Comm) -> tuple[Any, Any]:
    return scatter_and_split(comm), rows_and_both_ways(comm)


def scatter_and_split(comm: Comm) -> tuple[list[float], int, list[float], int]:
    """Return this rank's part of a sum over all ranks, its payload, and both in its half."""
    tensor = torch.arange(4.0 * comm.size).view(comm.size, 4) + 100 * comm.rank
    part = torch.empty(4)
    comm.reduce_scatter(part, tensor)
    sent = comm.traffic.payload_bytes
    half = comm.split(color=comm.rank % 2)
    gathered = torch.empty(half.size)
    half.all_gather(gathered, torch.tensor([float(comm.rank)]))
    return part.tolist(), sent, gathered.tolist(), comm.traffic.payload_bytes - sent


def rows_and_both_ways(comm: Comm) -> tuple[list[float], bool, int]:
    """Gather rows in place, and send messages so large that both directions have connections."""
    rows = torch.full((comm.size, 4), -1.0)
    rows[comm.rank] = comm.rank
    before = comm.traffic.payload_bytes
    comm.iall_gather_rows(rows).wait()
    sent = comm.traffic.payload_bytes - before
    n = TWO_WAY_BYTES + 1
    tensor = (10 * comm.rank + torch.arange(comm.size)).to(torch.uint8).repeat_interleave(n)
    output = torch.empty(comm.size, n, dtype=torch.uint8)
    comm.iall_to_all(output, tensor.view(comm.size, n)).wait()
    expected = (10 * torch.arange(comm.size) + comm.rank).to(torch.uint8)
    return rows[:, 0].tolist(), bool((output == expected[:, None]).all()), sent


def check(size: int, results: Sequence[Any]) -> None:
    of_ranks = 100.0 * sum(range(size))
    for rank, ((part, sent, gathered, sent_in_half), rows) in enumerate(results):
        assert part == [size * (4 * rank + i) + of_ranks for i in range(4)]
        assert sent == (size - 1) * 16
        assert gathered == [float(other) for other in range(rank % 2, size, 2)]
        assert sent_in_half == 4 * (len(gathered) - 1)
        assert rows == ([float(other) for other in range(size)], True, (size - 1) * 16)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_collectives_of_threads(size: int) -> None:
    check(size, run_ranks(size, collectives))


def collectives_on_gloo() -> tuple[Any, Any]:
    return collectives(join().comm)


def test_collectives_of_gloo() -> None:
    check(3, CREW.call(3, collectives_on_gloo))


def test_what_is_not_counted_leaves_parts_of_a_comm_counting() -> None:
    """As after an evaluation, which broadcasts buffers."""

    def rank_main(comm: Comm) -> int:
        part = comm.split(0)
        with comm.traffic.uncounted():
            comm.all_reduce(torch.zeros(8))
        part.all_reduce(torch.zeros(4))
        return comm.traffic.payload_bytes

    assert run_ranks(2, rank_main) == [16, 16]


GPU = torch.device("cuda", 0)
LIMIT = timedelta(seconds=7)


class Library:
    """A stand-in for torch.distributed with NCCL; records each communicator's options."""

    def __init__(self) -> None:
        self.joined = False
        self.made: list[dict[str, Any]] = []

    def init_process_group(self, backend: str, **given: Any) -> None:
        self.joined = True
        self.new_group(backend, **given)

    def new_group(self, backend: str, **given: Any) -> dist.ProcessGroup:
        names = ("NCCL_ALGO", "NCCL_PROTO", "NCCL_NVLS_ENABLE", "NCCL_COLLNET_ENABLE")
        self.made.append({**given, **{n: os.environ[n] for n in names if n in os.environ}})
        return alone()


def alone() -> dist.ProcessGroup:
    return dist.ProcessGroup(0, 1)  # type: ignore[call-arg]  # torch's stubs want a store


class Options:
    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config = SimpleNamespace(blocking=None)
        self._timeout = timedelta(minutes=10)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    own = Library()
    for name in ("NCCL_ALGO", "NCCL_PROTO", "NCCL_NVLS_ENABLE", "NCCL_COLLNET_ENABLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(dist, "init_process_group", own.init_process_group)
    monkeypatch.setattr(dist, "new_group", own.new_group)
    monkeypatch.setattr(dist, "is_initialized", lambda: own.joined)
    monkeypatch.setattr(dist, "get_backend", lambda group: "nccl")
    monkeypatch.setattr(type(dist.group), "WORLD", alone())
    nccl = SimpleNamespace(Options=Options)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", nccl, raising=False)
    return own


def connect(*settings: str) -> TorchComm:
    place = RankInfo("python", 0, 1, 0, 1, dist.HashStore())
    return build(load(list(settings)).comm)(place, GPU, "auto", LIMIT)


def test_an_algorithm_is_of_all_reduce_and_the_next_communicator_has_none_of_it(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_PROTO", "Simple")  # the user's own
    tree = connect("comm.nccl_algo=tree", "comm.nccl_proto=ll")
    plain = connect()
    first, second = library.made
    assert first["NCCL_ALGO"] == "ring,tree;allreduce:Tree"  # broadcast keeps its ring
    assert first["NCCL_PROTO"] == "allreduce:LL"
    assert "NCCL_ALGO" not in second and second["NCCL_PROTO"] == "Simple"
    assert "NCCL_ALGO" not in os.environ and os.environ["NCCL_PROTO"] == "Simple"
    assert tree.settings == {"NCCL_ALGO": first["NCCL_ALGO"], "NCCL_PROTO": "allreduce:LL"}
    assert plain.settings == {}


def test_the_environment_is_put_back_though_the_group_fails(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(backend: str, **given: Any) -> None:
        assert os.environ["NCCL_ALGO"].endswith("Ring")
        raise RuntimeError("no NVLink")

    monkeypatch.setattr(dist, "init_process_group", fail)
    with pytest.raises(ValueError, match="backend=nccl: cannot be used here: no NVLink"):
        connect("comm.nccl_algo=Ring")
    assert "NCCL_ALGO" not in os.environ


def test_deterministic_leaves_no_adding_to_switches(library: Library) -> None:
    comm = connect("deterministic=true")
    expected = {"NCCL_NVLS_ENABLE": "0", "NCCL_COLLNET_ENABLE": "0"}
    assert comm.settings == expected
    assert expected.items() <= library.made[0].items()
    assert not expected.keys() & os.environ.keys()


def test_communicators_are_made_at_once_with_streams_of_high_priority(library: Library) -> None:
    connect()
    connect()
    for made in library.made:
        options = made["pg_options"]
        assert made["device_id"] == GPU and made["timeout"] == LIMIT
        assert options.is_high_priority_stream
        assert options.config.blocking == 1  # otherwise NCCL reads its variables too late
        assert options._timeout == LIMIT  # torch warns of two


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["comm.nccl_algo=star"], "comm.nccl_algo=star: allowed: Ring, Tree, Coll"),
        (["comm.nccl_proto=fast"], "comm.nccl_proto=fast: allowed: LL, LL128, Simple"),
        (["comm.nccl_proto=7"], "comm.nccl_proto=7: allowed: LL"),
        (
            ["comm.nccl_algo=nvls", "comm.nccl_proto=LL"],
            "comm.nccl_proto=LL: NVLS supports only Simple",
        ),
        (["comm.nccl_algo=nvls", "deterministic=true"], "comm.nccl_algo=NVLS: sums in a switch"),
    ],
)
def test_what_nccl_does_not_know_is_one_line(
    library: Library, settings: list[str], message: str
) -> None:
    with refusing(message):
        connect(*settings)
    assert not library.made


class Group:
    """A process group of NCCL, which begins nothing, and notes where a collective would run."""

    def __init__(self) -> None:
        self.in_current_stream: list[bool] = []

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2

    def _note(self, *arguments: Any) -> None:
        options = [each for each in arguments if hasattr(each, "asyncOp")]
        self.in_current_stream += [not each.asyncOp for each in options] or [False]

    allreduce = broadcast = _note


for method in (torch_comm.ALL_GATHER, torch_comm.ALL_TO_ALL, torch_comm.REDUCE_SCATTER):
    setattr(Group, method, Group._note)


@pytest.mark.parametrize(("backend", "expected"), [("nccl", True), ("fake", False)])
def test_collectives_of_nccl_run_in_the_current_stream(
    backend: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_backend", lambda _: backend)
    group: Any = Group()
    comm = TorchComm(group, group, torch.device("cpu"))
    two, one = torch.ones(2, 3), torch.ones(3)
    comm.all_reduce(one)
    comm.all_gather(two, one)
    comm.iall_to_all(two, two.clone()).wait()
    comm.broadcast(one, 0)
    if backend == "nccl":
        comm.reduce_scatter(one, two)
    assert group.in_current_stream == [expected] * (4 + expected)


@dataclass
class Slow:
    """A collective that ends when it has been asked so often."""

    asked: int

    def wait(self) -> None: ...

    def is_completed(self) -> bool:
        self.asked -= 1
        return self.asked <= 0


def test_python_ends_after_the_last_collectives_but_waits_for_none_that_never_ends() -> None:
    ends, never = Slow(5), Slow(10**9)
    torch_comm._let_go([ends])
    assert ends.asked <= 0
    torch_comm._let_go([never])
    assert 0 < never.asked < 10**9 - 5
