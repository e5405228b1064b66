"""Environment of a run: machine and software."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.cuda.nccl

from lab.measure import nvidia

PREFIXES = (
    *("OMP_", "MKL_", "KMP_", "GLOO_", "HOROVOD_", "NCCL_", "TORCH_NCCL_"),
    *("CUDA_", "NVIDIA_", "CUBLAS_", "PYTORCH_", "TORCHINDUCTOR_", "TRITON_"),
)
SECRETS = ("KEY", "TOKEN", "SECRET", "PASSWORD")


def environment(num_hosts: int, asks_tools: bool = True) -> dict[str, Any]:
    """Describe machine and software, so that others can judge or repeat a measurement.

    Args:
        asks_tools: also ask nvidia-smi, which takes seconds; one process per host suffices.
    """
    with warnings.catch_warnings(action="ignore"):  # about a driver that is too old
        has_gpus = torch.cuda.is_available()
    visible = range(torch.cuda.device_count() if has_gpus else 0)  # it counts unusable GPUs too
    return {
        "hostname": platform.node(),
        "os": platform.platform(),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if has_gpus else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if has_gpus else None,
        "triton": _version("triton"),
        "tf32": _tf32(),
        "gpus": [torch.cuda.get_device_name(i) for i in visible],
        "compute_capability": [torch.cuda.get_device_capability(i) for i in visible],
        "nvls": [nvidia.adds_in_switch(i) for i in visible],
        "host_gpus": nvidia.gpus() if has_gpus and asks_tools else None,
        "cpu": cpu_model(),
        "num_cores": num_cores(),
        "memory_gib": memory_gib(),
        "num_threads": torch.get_num_threads(),
        "numa_nodes": _numa_nodes(),
        "num_hosts": num_hosts,
        "gpu_links": nvidia.links() if has_gpus and asks_tools else None,
        "network_interfaces": _network_interfaces(),
        "variables": {k: v for k, v in sorted(os.environ.items()) if _shapes_speed(k)},
    }


def device_and_torch(device: torch.device) -> str:
    """Describe device and torch in a few words."""
    if device.type == "cuda":
        where = torch.cuda.get_device_name(device)
    else:
        where = f"{cpu_model()} ({torch.get_num_threads()} threads)"
    return f"{where}, torch {torch.__version__}"


def git_commit() -> dict[str, Any]:
    """Return the checkout's commit and whether it has changes; None without a checkout."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return {"commit": None, "dirty": None}
    commit = _git(root, "rev-parse", "HEAD")
    return {"commit": commit, "dirty": commit and bool(_git(root, "status", "--porcelain"))}


def cpu_model() -> str:
    """Return the processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_gib() -> int:
    """Return the size of the host's memory in GiB."""
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)


def _shapes_speed(variable: str) -> bool:
    return variable.startswith(PREFIXES) and not any(word in variable for word in SECRETS)


def _tf32() -> dict[str, bool]:
    """Return where torch may round float32 to TF32 on GPUs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # see lab.training.arithmetic
        return {
            "products": bool(torch.backends.cuda.matmul.allow_tf32),
            "convolutions": bool(torch.backends.cudnn.allow_tf32),
        }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _numa_nodes() -> dict[str, str | None]:
    """Return the CPUs of each NUMA node as the kernel writes them: 0-15,32-47."""
    nodes = sorted(Path("/sys/devices/system/node").glob("node[0-9]*"))
    return {path.name.removeprefix("node"): _text(path / "cpulist") for path in nodes}


def _network_interfaces() -> dict[str, int | None]:
    """Return the speed in Mbit/s of each network interface that is up, if its driver reports it."""
    speeds = {}
    for path in sorted(Path("/sys/class/net").glob("*")):
        if _text(path / "operstate") in ("up", "unknown"):
            speed = _text(path / "speed") or "-1"  # virtual interfaces report -1
            speeds[path.name] = int(speed) if int(speed) > 0 else None
    return speeds


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:  # a driver may refuse to answer
        return None


def _git(root: Path, *arguments: str) -> str | None:
    return _output("git", "-C", str(root), *arguments)


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
