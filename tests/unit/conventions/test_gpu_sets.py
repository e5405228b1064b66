"""Decisions of the GPU tests before any of them runs."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from lab.distributed.comm import Comm, Handle, ThreadComm, run_ranks
from lab.exchange.bucket import GradBucket
from lab.settings.config import build, load
from tests.gpu import conftest, runs
from tests.support.cases import LIBRARIES, OVER_TIME, STRATEGIES
from tests.support.slow import some_of


@pytest.mark.parametrize(
    "strategy", some_of([s for s in STRATEGIES if s not in LIBRARIES], every=4)
)
def test_an_exchange_says_whether_it_sends_from_rank_to_rank(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = (f"strategy={strategy}", *(f"exchange.{s}" for s in OVER_TIME.get(strategy, ())))
    node, begin, used = load(settings).exchange, ThreadComm._isend_irecv, set()

    def isend_irecv(comm: ThreadComm, sends: Any, receives: Any) -> Handle:
        used.add(comm.rank)
        return begin(comm, sends, receives)

    def rank_main(comm: Comm) -> None:
        exchange = build(node)
        for step in range(3):  # `auto` takes turns from the second one on
            bucket = GradBucket({"w": torch.Size((8, 100))}, torch.randn(800), step)
            exchange.average(bucket, comm)

    monkeypatch.setattr(ThreadComm, "_isend_irecv", isend_irecv)
    run_ranks(3, rank_main)
    assert used == ({0, 1, 2} if runs.needs_send_recv(strategy) else set())


def test_without_a_gpu_what_wants_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for wanted in (None, "cpu"):
        monkeypatch.setattr(conftest, "WANTED", wanted)
        conftest.pytest_sessionstart()
    monkeypatch.setattr(conftest, "WANTED", "cuda")
    with pytest.raises(pytest.UsageError, match="LAB_TEST_DEVICE=cuda: no GPU that torch"):
        conftest.pytest_sessionstart()


@pytest.mark.parametrize(("visible", "first"), [(None, "0"), ("3,5", "3")])
def test_ranks_share_the_first_gpu_though_there_are_several(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, first: str
) -> None:
    monkeypatch.setattr(os, "environ", {"CUDA_VISIBLE_DEVICES": visible} if visible else {})
    runs._prepare(runs.APART)
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == visible
    runs._prepare("gloo")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == first
