"""Options of NCCL, checked with stand-ins: nothing here needs a GPU."""

from __future__ import annotations

import os
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lab.distributed.launcher import RankInfo
from lab.distributed.torch_comm import TorchComm
from lab.settings.config import build, load

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
        (["comm.nccl_algo=star"], "comm.nccl_algo=star: allowed are Ring, Tree, Coll"),
        (["comm.nccl_proto=fast"], "comm.nccl_proto=fast: allowed are LL, LL128, Simple"),
        (["comm.nccl_proto=7"], "comm.nccl_proto=7: allowed are LL"),
        (["comm.nccl_algo=nvls", "comm.nccl_proto=LL"], "comm.nccl_proto=LL: NVLS has only Simple"),
        (["comm.nccl_algo=nvls", "deterministic=true"], "comm.nccl_algo=NVLS: sums in a switch"),
    ],
)
def test_what_nccl_does_not_know_is_one_line(
    library: Library, settings: list[str], message: str
) -> None:
    with pytest.raises(ValueError) as error:
        connect(*settings)
    assert str(error.value).startswith(message)
    assert not library.made
