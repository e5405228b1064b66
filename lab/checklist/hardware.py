"""Describe this machine: `python -m lab.checklist.hardware` prints JSON.

This is a separate process, because a process that has queried a GPU holds its memory to the end.
"""

from __future__ import annotations

import json
import shutil
import sysconfig
from pathlib import Path
from typing import Any

import torch

from lab.distributed.world import is_available, torch_build
from lab.measure.environment import environment, git_commit, gpus

DRIVERS = {13: 580, 12: 525}  # the oldest driver for a CUDA of this major version


def hardware() -> dict[str, Any]:
    """Describe GPUs, their software, and Triton's requirements for compiling."""
    listed = gpus() or []
    usable = is_available()
    cuda = int((torch.version.cuda or "0").split(".")[0])
    driver = int(listed[0]["driver"].split(".")[0]) if listed else 0
    return {
        "usable": usable,
        "num_listed": len(listed),
        "torch": torch_build(),
        "driver": driver,
        "driver_is_new_enough": driver >= DRIVERS.get(cuda, 0),
        "num_mig": sum(gpu["mig"] == "Enabled" for gpu in listed),
        "max_sm_mhz": listed[0]["max_sm_clock_mhz"] if listed else None,
        "memory_gb_per_s": _memory_gb_per_s() if usable else None,
        "compiler": shutil.which("gcc") is not None or shutil.which("cc") is not None,
        "python_header": Path(sysconfig.get_path("include"), "Python.h").exists(),
        "environment": environment(1),
        "git_commit": git_commit(),
    }


def _memory_gb_per_s() -> float | None:
    """Compute the first GPU's peak rate: two transfers per clock; None if torch is too old."""
    about = torch.cuda.get_device_properties(0)
    clock_khz, bits = (getattr(about, n, 0) for n in ("memory_clock_rate", "memory_bus_width"))
    return 2 * clock_khz * 1e3 * bits / 8 / 1e9 or None


if __name__ == "__main__":
    print(json.dumps(hardware()))
