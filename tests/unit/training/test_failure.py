"""The status of an error: by type, or by message if the library's error has no type."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist

from lab.training.run import failure_of


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (KeyboardInterrupt(), "interrupted"),
        (torch.OutOfMemoryError("CUDA out of memory"), "oom"),
        (MemoryError(), "oom"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "oom"),
        (TimeoutError(), "timeout"),
        (RuntimeError("Timed out waiting 3000ms for recv operation to complete"), "timeout"),
        (dist.DistStoreError("wait timeout after 3000ms"), "timeout"),
        (ConnectionResetError(), "failed"),
        (ValueError("data.timeout=3: timed out"), "failed"),  # not a library's
        (FloatingPointError("loss not finite"), "failed"),
    ],
)
def test_status_of_an_error(error: BaseException, status: str) -> None:
    assert failure_of(error, 1).status == status


class Mute(Exception):
    """An error that has no text."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_an_error_may_have_no_text_or_one_that_no_file_holds() -> None:
    assert failure_of(Mute(), 1).error == "rank 1: Mute: (its text cannot be read)"
    assert failure_of(ValueError("a\ud800"), 0).error == r"rank 0: ValueError: a\ud800"
    assert len(failure_of(ValueError("x" * 10**6), 0).error) < 11_000


def test_a_lost_rank_is_said_so() -> None:
    for error in (
        RuntimeError("\n[tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4711: \nmore"),
        RuntimeError("Connection reset"),
        ConnectionResetError("[Errno 104] Connection reset"),
    ):
        assert failure_of(error, 2).error.startswith("rank 2: lost another rank: ")
    wrong = failure_of(ValueError("peer=x: must be a number"), 0)
    assert wrong.error == "rank 0: ValueError: peer=x: must be a number"


def test_an_error_of_the_users_code_names_its_place_and_holds_the_traceback() -> None:
    def fails() -> None:
        raise IndexError("odd")

    with pytest.raises(IndexError) as caught:
        fails()
    failure = failure_of(caught.value, 3)
    assert re.fullmatch(r"rank 3: IndexError: odd \(test_failure\.py:\d+ in fails\)", failure.error)
    assert failure.traceback and failure.traceback.endswith("IndexError: odd")
    assert failure_of(ValueError("odd"), 3).traceback is None
