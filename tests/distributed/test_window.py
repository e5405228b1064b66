"""Memory that ranks share, each a process: it trains as messages do, or all do without it."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from lab.distributed import torch_comm
from lab.distributed.comm import Comm, NoWindow, ThreadComm, run_ranks
from tests.conftest import wait_for
from tests.support.ranks import CREW, Outcome, composed, execute, join, spawn, train

RUN = ("data.size=16", "batch_size=24", "optim.lr=0.01", "steps=6", "warmup_steps=1")
CPU = torch.device("cpu", 0)


def no_file_stays() -> None:
    """Wait until no window has a file: another test's may be there until it is mapped."""
    wait_for(lambda: not [*Path(torch_comm.IN_MEMORY).glob("lab-window*")])


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("overlap", ["false", "true"])
def test_a_run_has_the_weights_of_one_with_messages(size: int, overlap: str) -> None:
    settings = ("strategy=overlap", "codec=int4", "bucket_mb=0.05", f"overlap={overlap}", *RUN)
    ours, theirs = (train(size, f"path={path}", *settings) for path in ("symmetric", "two_stage"))
    assert len({outcome.record["replica_hash"] for outcome in (*ours, *theirs)}) == 1
    sent = [outcomes[0].record["payload_bytes_per_step"] for outcomes in (ours, theirs)]
    assert sent[0] == sent[1]
    assert ours[0].record["certificate"]["holds"]
    num_parameters = len(ours[0].weights)
    assert ours[0].record["choices"] == [{"path": "symmetric", "parameters": num_parameters}]
    no_file_stays()


def without_room(arguments: list[str], config: Any) -> Outcome:
    torch_comm.IN_MEMORY = "/no-such-folder"
    return execute(arguments, config)


def test_ranks_without_room_for_it_send_messages() -> None:
    settings = composed("strategy=overlap", "path=symmetric", "codec=int8", *RUN)
    (first, second) = spawn(2, without_room, *settings)
    choices = first.record["choices"]
    assert choices == second.record["choices"]
    assert [choice["path"] for choice in choices] == ["two_stage"]
    assert "rank 0: [Errno 2] No such file or directory" in choices[0]["why"]
    messages = train(2, "strategy=overlap", "path=two_stage", "codec=int8", *RUN)
    assert first.record["replica_hash"] == messages[0].record["replica_hash"]


def see_others() -> tuple[list[int], tuple[int, ...]]:
    world = join()
    comm, row_bytes = world.comm, 5000
    first = comm.window(row_bytes, world.device)
    assert [row.tolist() for row in first.rows] == [[0] * row_bytes] * comm.size
    second = comm.window(row_bytes, world.device)  # waits for all to have looked
    first.rows[comm.rank].fill_(comm.rank + 1)
    comm.imeet(first, row_bytes, last=False).wait()
    seen = [int(row.sum()) // row_bytes for row in first.rows]
    for row in second.rows:
        row[comm.rank] = comm.rank + 1
    comm.imeet(second, 1, last=True).wait()
    return seen + second.rows[comm.rank][: comm.size].tolist(), comm.traffic.so_far()


def test_ranks_see_what_others_wrote_before_they_met() -> None:
    for seen, (payload_bytes, num_messages, across_bytes) in CREW.call(3, see_others):
        assert seen == [1, 2, 3, 1, 2, 3]
        assert (payload_bytes, num_messages, across_bytes) == (2 * 5000 + 2 * 1, 4, 0)
    no_file_stays()


def test_a_file_that_does_not_fit_is_refused_before_it_is_written() -> None:
    room = os.statvfs(torch_comm.IN_MEMORY)
    too_much = 2 * room.f_blocks * room.f_frsize
    if too_much == 0:
        pytest.skip(f"{torch_comm.IN_MEMORY} has no limit here")

    def rank_main(comm: Comm) -> str:
        with pytest.raises(NoWindow) as caught:
            torch_comm.in_file(comm, too_much)
        return str(caught.value)

    assert len({*run_ranks(2, rank_main)}) == 1
    no_file_stays()


class FakeHandle(SimpleNamespace):
    """As torch's _SymmetricMemory, of ranks that are threads."""

    def get_buffer(self, rank: int, sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        assert (self.buffers[rank].shape, self.buffers[rank].dtype) == (sizes, dtype)
        return self.buffers[rank].view(sizes)  # another tensor of the same memory


def shared(tensor: Tensor, group: ThreadComm) -> FakeHandle:
    group.meeting.slots[group.rank] = tensor
    group.meeting.barrier.wait()
    handle = FakeHandle(buffers=[*group.meeting.slots])
    group.meeting.barrier.wait()
    return handle


def on_gpus(comm: Comm) -> list[int] | str:
    try:
        made = torch_comm.symmetric(comm, comm, 64, CPU)  # pyright: ignore[reportArgumentType]
    except NoWindow as error:
        return str(error)
    made.rows[comm.rank].fill_(comm.rank)
    comm.all_reduce(torch.zeros(1))
    return [int(row[-1]) for row in made.rows]


def test_gpus_memory_is_the_librarys_in_rank_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symmetric_memory, "rendezvous", shared)
    monkeypatch.setattr(symmetric_memory, "empty", torch.empty)
    assert run_ranks(3, on_gpus) == [[0, 1, 2]] * 3


def test_one_gpu_that_cannot_is_named_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symmetric_memory, "empty", torch.empty)

    def rendezvous(tensor: Tensor, group: ThreadComm) -> FakeHandle:
        if group.rank == 2:
            raise RuntimeError("\nCUDA error: overlapping devices\nmore")
        return FakeHandle(buffers=[tensor] * group.size)

    monkeypatch.setattr(symmetric_memory, "rendezvous", rendezvous)
    assert run_ranks(3, on_gpus) == ["rank 2: CUDA error: overlapping devices"] * 3


def test_a_gpu_without_access_to_another_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, other: own > other)

    def rank_main(comm: Comm) -> str:
        with pytest.raises(NoWindow) as caught:
            group: Any = comm
            torch_comm.symmetric(comm, group, 64, torch.device("cpu", comm.rank))
        return str(caught.value)

    assert run_ranks(2, rank_main) == ["rank 0: GPU 0 has no access to the memory of GPU 1"] * 2
