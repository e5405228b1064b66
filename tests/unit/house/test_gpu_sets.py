"""Decisions of the GPU tests before any of them runs."""

from __future__ import annotations

import os

import pytest
import torch

from tests.gpu import conftest, runs
from tests.support.cases import STRATEGIES


def test_who_needs_send_and_recv_is_read_off_the_exchanges() -> None:
    found = {strategy for strategy in STRATEGIES if runs.needs_send_recv(strategy)}
    trees = {"tree", "tree_pipelined", "tree_double", "tree_overlap", "caffe"}
    assert found == trees | {"ring", "star", "torch7", "tensorflow"}


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
