"""The GPUs of this host, and whether this torch can use them."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path

import torch

ROOT = Path("/")
NONE_WANTED = ("", "-1", "NoDevFiles")  # in CUDA_VISIBLE_DEVICES: the user or SLURM hides all
REMEDY = (
    "PyPI's torch wants driver 580 or newer and a GPU of Turing or newer, "
    "TORCH_INDEX=https://download.pytorch.org/whl/cu126 (README) installs one for older ones; "
    "or set device=cpu"
)


def pick_device(device: str, local_rank: int, local_size: int) -> torch.device:
    """Choose the device of a rank; a GPU becomes the current device.

    Args:
        device, local_size: as for `check_gpus`.
        local_rank: this rank among those of its host, which take the GPUs in turn.

    Raises:
        ValueError: see `check_gpus`; or the GPU fails, or is too old for this torch.
    """
    if not check_gpus(device, local_size):
        return torch.device("cpu")
    index = local_rank % torch.cuda.device_count()
    try:
        torch.cuda.set_device(index)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"device={device}: {torch_build()} cannot use GPU {index}: {reason}"
        ) from None
    _check_capability(device, index)
    return torch.device("cuda", index)


def check_gpus(device: str, local_size: int) -> bool:
    """Return whether the `local_size` ranks of this host compute on GPUs, one each.

    Args:
        device: "auto" (GPUs where there are any), "cpu" or "cuda".

    Raises:
        ValueError: more ranks than GPUs, or this torch can use none of them.
    """
    if device == "cpu":
        return False
    if not is_available():
        driver = _driver()
        if driver:
            raise ValueError(
                f"device={device}: this host has NVIDIA GPUs (driver {driver}), but "
                f"{torch_build()} cannot use them; {REMEDY}"
            )
        if device == "cuda":
            raise ValueError("device=cuda: torch sees no GPU on this host; set device=cpu")
        return False
    num_gpus = torch.cuda.device_count()
    if local_size > num_gpus:
        raise ValueError(
            f"device={device}: {local_size} ranks on this host but {num_gpus} GPUs; start at most "
            f"{num_gpus} ranks, or set device=cpu or share_gpus=true"
        )
    return True


def is_available() -> bool:
    """Return whether torch can use a GPU, silently; device_count() counts unusable ones too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.cuda.is_available()


def _driver() -> str | None:
    """Return the version of NVIDIA's driver; None if this process has no GPU.

    A container sees its host's /proc, but only the devices that it was given; a SLURM job sees all
    devices, but can open only its own. WSL has a driver without either.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES") in NONE_WANTED:
        return None
    if (ROOT / "dev/dxg").exists() and (ROOT / "usr/lib/wsl/lib/libcuda.so.1").exists():
        return "of Windows"
    try:
        text = (ROOT / "proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = re.search(r"\d{3,}\.\d+(\.\d+)?", text)
    devices = (ROOT / "dev").glob("nvidia[0-9]*")
    return found[0] if found and any(map(_opens, devices)) else None


def _opens(device: Path) -> bool:
    try:
        os.close(os.open(device, os.O_RDWR))
    except OSError:
        return False
    return True


def torch_build() -> str:
    """Describe this torch: its version and the CUDA that it was built for."""
    built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    return f"torch {torch.__version__} (built {built})"


def _check_capability(device: str, index: int) -> None:
    major, minor = torch.cuda.get_device_capability(index)
    built_for = [int(name[3:].rstrip("af")) for name in torch.cuda.get_arch_list() if "sm_" in name]
    if built_for and 10 * major + minor < min(built_for):
        raise ValueError(
            f"device={device}: GPU {index} has capability {major}.{minor}, older than any that "
            f"{torch_build()} supports; {REMEDY}"
        )
