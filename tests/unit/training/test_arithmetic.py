"""Switches of the whole process: TF32 and deterministic algorithms."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch

from lab.measure.environment import environment
from lab.settings.config import ConfigError, load
from lab.training import assemble
from lab.training.assemble import set_arithmetic


@pytest.fixture(autouse=True)
def put_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE"):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    products, cudnn = torch.backends.cuda.matmul, cast(Any, torch.backends.cudnn)
    before = products.allow_tf32, cudnn.allow_tf32, cudnn.benchmark
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    products.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = before
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("tf32", [True, False])
def test_tf32_is_one_switch_for_products_and_convolutions(tf32: bool) -> None:
    set_arithmetic(tf32, deterministic=False)
    assert environment(num_hosts=1)["tf32"] == {"products": tf32, "convolutions": tf32}
    expected = "tf32" if tf32 else "ieee"
    assert torch.backends.cuda.matmul.fp32_precision == expected
    assert (torch.backends.cudnn.conv.fp32_precision == "tf32") is tf32  # type: ignore[attr-defined]


def test_fp32_is_ieee_unless_tf32_is_set() -> None:
    assert load([]).tf32 is False


@pytest.mark.parametrize(("variable", "tf32"), [("0", True), ("1", False)])
def test_a_variable_that_says_otherwise_is_refused_before_ranks_meet(
    monkeypatch: pytest.MonkeyPatch, variable: str, tf32: bool
) -> None:
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", variable)
    config = load([f"tf32={tf32}", "device=cpu"])
    line = rf"tf32={str(tf32).lower()}: NVIDIA_TF32_OVERRIDE={variable} overrides it"
    with pytest.raises(ConfigError, match=line):
        assemble.join(config)
    set_arithmetic(not tf32, deterministic=False)


def test_deterministic_prepares_cublas_too() -> None:
    set_arithmetic(tf32=False, deterministic=True)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert torch.are_deterministic_algorithms_enabled() and not torch.backends.cudnn.benchmark
    set_arithmetic(tf32=False, deterministic=False)
    assert not torch.are_deterministic_algorithms_enabled() and torch.backends.cudnn.benchmark


def test_a_workspace_that_the_user_chose_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    set_arithmetic(tf32=False, deterministic=True)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_threads_are_set_or_left_as_the_environment_has_them() -> None:
    torch.set_num_threads(1)
    set_arithmetic(tf32=False, deterministic=False)
    assert torch.get_num_threads() == 1
    set_arithmetic(tf32=False, deterministic=False, threads=2)
    assert torch.get_num_threads() == 2
