"""The choice of GPUs on simulated machines: torch.cuda and /proc are replaced."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lab.distributed import world

VERSION = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (root)\n"
Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    """Make a host: its driver and devices, the CUDA torch is built for, the GPUs torch counts."""

    def make(
        driver: str | None = None,
        devices: tuple[str, ...] = (),
        cuda: str | None = "13.0",
        counted: int = 0,
        usable: bool = False,
        visible: str | None = None,
        capability: tuple[int, int] = (9, 0),
    ) -> None:
        (tmp_path / "dev").mkdir()
        for name in devices:
            (tmp_path / "dev" / name).touch()
        if driver:
            (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
            (tmp_path / "proc/driver/nvidia/version").write_text(VERSION.format(driver))
        monkeypatch.setattr(world, "ROOT", tmp_path)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: usable)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: counted)
        monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_90a", "compute_120"])

    return make


def test_ranks_take_gpus_in_turn(machine: Machine) -> None:
    machine("580.65.06", ("nvidia0", "nvidia1"), counted=2, usable=True)
    picked = [world.pick_device("auto", rank, 1) for rank in range(3)]
    assert [str(each) for each in picked] == ["cuda:0", "cuda:1", "cuda:0"]


def test_more_ranks_than_gpus_are_refused(machine: Machine) -> None:
    machine("580.65.06", ("nvidia0",), counted=1, usable=True)
    with pytest.raises(ValueError, match="device=auto: 2 ranks on this host but 1 GPUs"):
        world.check_gpus("auto", 2)


@pytest.mark.parametrize("device", ["auto", "cuda"])
@pytest.mark.parametrize(
    ("cuda", "counted", "said"),
    [
        ("13.0", 8, f"torch {torch.__version__} (built for CUDA 13.0)"),  # NVML counts, CUDA fails
        (None, 0, f"torch {torch.__version__} (built without CUDA)"),
    ],
)
def test_gpus_that_torch_cannot_use_are_no_reason_for_the_cpu(
    machine: Machine, device: str, cuda: str | None, counted: int, said: str
) -> None:
    machine("535.104.05", ("nvidia0", "nvidiactl"), cuda=cuda, counted=counted)
    with pytest.raises(ValueError) as error:
        world.pick_device(device, 0, 1)
    (line,) = str(error.value).splitlines()
    assert line.startswith(f"device={device}: this host has NVIDIA GPUs (driver 535.104.05), but ")
    assert said in line
    assert "TORCH_INDEX=https://download.pytorch.org/whl/cu126" in line
    assert world.pick_device("cpu", 0, 1) == torch.device("cpu")


@pytest.mark.parametrize(
    "host",
    [
        {},
        {"driver": "535.104.05", "devices": ("nvidiactl",)},  # a container without GPUs
        {"driver": "535.104.05", "devices": ("nvidia0",), "visible": ""},
        {"driver": "535.104.05", "devices": ("nvidia0",), "visible": "-1"},
    ],
)
def test_without_gpus_or_with_hidden_ones_ranks_compute_on_the_cpu(
    machine: Machine, host: dict[str, Any]
) -> None:
    machine(**host)
    assert world.pick_device("auto", 0, 4) == torch.device("cpu")
    with pytest.raises(ValueError, match="device=cuda: torch sees no GPU on this host"):
        world.pick_device("cuda", 0, 1)


def test_a_gpu_that_this_job_may_not_open_is_not_its_own(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    machine("535.104.05", ("nvidia0",))
    monkeypatch.setattr(world.os, "open", refuse)
    assert world.pick_device("auto", 0, 1) == torch.device("cpu")


def test_linux_under_windows_has_a_driver_of_its_own(machine: Machine, tmp_path: Path) -> None:
    machine(devices=("dxg",), cuda=None)
    assert world.pick_device("auto", 0, 1) == torch.device("cpu")  # another maker's GPU
    (tmp_path / "usr/lib/wsl/lib").mkdir(parents=True)
    (tmp_path / "usr/lib/wsl/lib/libcuda.so.1").touch()
    with pytest.raises(ValueError, match=r"has NVIDIA GPUs \(driver of Windows\), but torch"):
        world.pick_device("auto", 0, 1)


def test_gpus_older_than_torch_are_refused(machine: Machine) -> None:
    machine("580.65.06", ("nvidia0",), counted=1, usable=True, capability=(7, 0))
    with pytest.raises(ValueError, match=r"GPU 0 has capability 7\.0, older .*whl/cu126"):
        world.pick_device("auto", 0, 1)


def test_a_gpu_that_refuses_is_one_line(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(index: int) -> None:
        raise RuntimeError("CUDA-capable device(s) is/are busy or unavailable\nCompile with ...")

    machine("580.65.06", ("nvidia0",), counted=1, usable=True)
    monkeypatch.setattr(torch.cuda, "set_device", refuse)
    with pytest.raises(ValueError, match=r"cannot use GPU 0: CUDA-capable .* unavailable$"):
        world.pick_device("cuda", 0, 1)


def test_torchs_own_warning_is_left_out(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def warn() -> bool:
        warnings.warn("CUDA initialization: The NVIDIA driver is too old", stacklevel=1)
        return False

    machine("535.104.05", ("nvidia0",))
    monkeypatch.setattr(torch.cuda, "is_available", warn)
    with pytest.raises(ValueError, match="driver 535"):
        world.check_gpus("auto", 1)
