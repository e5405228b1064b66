"""The environment in a record, from the output of tools."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.cuda.nccl
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lab.measure import environment as nvidia
from lab.measure.environment import environment, source_hash

# nvidia-smi 580 on two GPUs of one host, one of them without its own power limit.
PRINTED = """\
NVIDIA H200, 580.95.05, Disabled, 00000000:0F:00.0, 700.00, 345, 1980
NVIDIA H200, 580.95.05, [N/A], 00000000:2D:00.0, [Not Supported], 1980, 1980"""


def test_each_gpu_is_recorded_with_what_it_says() -> None:
    first, second = nvidia.parse(PRINTED)
    assert first == {
        "name": "NVIDIA H200",
        "driver": "580.95.05",
        "mig": "Disabled",
        "pci_bus_id": "00000000:0F:00.0",
        "power_limit_w": 700.0,
        "sm_clock_mhz": 345.0,
        "max_sm_clock_mhz": 1980.0,
    }
    assert second["mig"] is None and second["power_limit_w"] is None
    assert second["sm_clock_mhz"] == 1980.0


@pytest.mark.parametrize("text", ["", "No devices were found", "Warning: infoROM is corrupted"])
def test_what_is_no_gpu_is_none(text: str) -> None:
    assert nvidia.parse(text) == []


def test_one_query_with_time_enough_asks_for_all_of_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[tuple[list[str], float]] = []

    def run(command: list[str], timeout: float, **_: Any) -> Any:
        asked.append((command, timeout))
        return SimpleNamespace(returncode=0, stdout=PRINTED)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(nvidia, "PCI_DEVICES", tmp_path)
    (tmp_path / "0000:0f:00.0").mkdir()
    (tmp_path / "0000:0f:00.0" / "numa_node").write_text("1\n")
    gpus = nvidia.gpus()
    assert gpus is not None
    assert [gpu["numa_node"] for gpu in gpus] == [1, None]
    ((command, timeout),) = asked
    assert timeout == 30
    assert command[1].startswith("--query-gpu=name,driver_version,mig.mode.current,")


@pytest.mark.parametrize(
    "error", [FileNotFoundError(), subprocess.TimeoutExpired("nvidia-smi", 30)]
)
def test_without_an_answer_of_nvidia_smi_nothing_is_made_up(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def run(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(subprocess, "run", run)
    assert nvidia.gpus() is None and nvidia.links() is None


def test_the_table_of_links_has_no_terminal_escapes(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = SimpleNamespace(returncode=0, stdout="\x1b[4mGPU0\tCPU\x1b[0m\nGPU0\t X \n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: answer)
    assert nvidia.links() == "GPU0\tCPU\nGPU0\t X"


def test_one_process_of_a_host_asks_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 7))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    monkeypatch.setattr(nvidia, "_smi", lambda *_: asked.append("once") or "")
    assert environment(1, asks_tools=False)["host_gpus"] is None and not asked
    assert environment(1)["host_gpus"] == [] and asked == ["once", "once"]


@pytest.mark.parametrize(("error", "expected"), [(0, True), (100, None)])
def test_nvls_is_what_the_driver_says_of_the_gpu(
    monkeypatch: pytest.MonkeyPatch, error: int, expected: bool | None
) -> None:
    def attribute(value: Any, name: int, device: Any) -> int:
        assert (name, device.value) == (132, 17)
        value._obj.value = 1
        return error

    def get(device: Any, index: int) -> int:
        assert index == 5
        device._obj.value = 17
        return 0

    driver = SimpleNamespace(
        cuInit=lambda flags: 0, cuDeviceGet=get, cuDeviceGetAttribute=attribute
    )
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    assert nvidia.adds_in_switch(5) is expected


@pytest.mark.parametrize("counted", [0, 8])  # eight, for which the driver is too old
def test_without_gpus_no_tool_is_asked_and_the_keys_are_there(
    monkeypatch: pytest.MonkeyPatch, counted: int
) -> None:
    def smi(*arguments: str) -> str:
        raise AssertionError(f"nvidia-smi {arguments} was run")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: counted)
    monkeypatch.setattr(nvidia, "_smi", smi)
    found = environment(num_hosts=1)
    assert found["gpus"] == found["nvls"] == found["compute_capability"] == []
    assert found["host_gpus"] is found["gpu_links"] is found["cudnn"] is None
    assert set(found["tf32"]) == {"products", "convolutions"}


def test_variables_that_shape_speed_are_recorded_and_secrets_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shaping = {
        "NVIDIA_TF32_OVERRIDE": "0",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "NCCL_IB_HCA": "mlx5",
        "TORCHINDUCTOR_MAX_AUTOTUNE": "1",
    }
    secret = ("PYTORCH_API_KEY", "NVIDIA_CREDENTIALS", "HOROVOD_AUTH", "NCCL_PASS", "OMP_X")
    for name, value in {**shaping, **dict.fromkeys(secret, "hush")}.items():
        monkeypatch.setenv(name, value)
    recorded = environment(num_hosts=1)["variables"]
    assert shaping.items() <= recorded.items()
    assert "hush" not in recorded.values()


class Net(nn.Sequential): ...


class Other(nn.Sequential):
    """Of other source."""


def test_a_sharded_model_has_the_code_of_the_model() -> None:
    """fully_shard replaces the class of each unit; runs with and without it are compared."""
    model = Net(nn.Linear(2, 2))
    before = source_hash(model)
    model.__class__ = type("FSDPNet", (FSDPModule, Net), {})
    assert source_hash(model) == before != source_hash(Other(nn.Linear(2, 2)))


@pytest.mark.parametrize(("status", "dirty"), [("", False), (" M a.py", True), (None, True)])
def test_a_checkout_of_which_git_cannot_tell_counts_as_changed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: str | None, dirty: bool
) -> None:
    (tmp_path / ".git").touch()
    monkeypatch.setattr(nvidia, "__file__", str(tmp_path / "lab/measure/environment.py"))
    answers = {"rev-parse": "0123abcd", "status": status}
    monkeypatch.setattr(nvidia, "_output", lambda *words, **_: answers[words[3]])
    assert nvidia.git_commit() == {"commit": "0123abcd", "dirty": dirty}
