"""Facts about this host's GPUs, from NVIDIA's tools and driver."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path
from typing import Any

SMI_S = 30.0  # eight idle GPUs without persistence mode take more than a few seconds
# By key of the record; nvidia-smi --help-query-gpu explains them.
TEXTS = {
    "name": "name",
    "driver": "driver_version",
    "mig": "mig.mode.current",
    "pci_bus_id": "pci.bus_id",
}
NUMBERS = {
    "power_limit_w": "power.limit",
    "sm_clock_mhz": "clocks.current.sm",
    "max_sm_clock_mhz": "clocks.max.sm",
}
STYLES = re.compile(r"\x1b\[[0-9;]*m")  # it underlines the head of its table, in pipes too
PCI_DEVICES = Path("/sys/bus/pci/devices")
MULTICAST = 132  # CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED of the driver's API


def gpus() -> list[dict[str, Any]] | None:
    """Describe all GPUs of this host, hidden ones included; None without nvidia-smi.

    Clocks are current ones; an idle GPU's are low.
    """
    fields = ",".join([*TEXTS.values(), *NUMBERS.values()])
    text = _smi(f"--query-gpu={fields}", "--format=csv,noheader,nounits")
    if text is None:
        return None
    return [{**gpu, "numa_node": _numa_node(gpu["pci_bus_id"])} for gpu in parse(text)]


def parse(text: str) -> list[dict[str, Any]]:
    """Parse nvidia-smi's answer, a line per GPU; None for values that a GPU does not report."""
    gpus = []
    for line in text.splitlines():
        values = [None if "[" in value else value for value in line.split(", ")]
        if len(values) != len(TEXTS) + len(NUMBERS):
            continue  # a warning
        numbers = [value and float(value) for value in values[len(TEXTS) :]]
        gpus.append(dict(zip([*TEXTS, *NUMBERS], [*values[: len(TEXTS)], *numbers], strict=True)))
    return gpus


def links() -> str | None:
    """Return nvidia-smi's table of how GPUs and network adapters are connected."""
    return _smi("topo", "--matrix")


def adds_in_switch(index: int) -> bool | None:
    """Return whether the NVSwitch can sum for GPU `index` of this process (NCCL's NVLS)."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, value = ctypes.c_int(), ctypes.c_int()
    errors = (
        driver.cuInit(0),
        driver.cuDeviceGet(ctypes.byref(device), index),
        driver.cuDeviceGetAttribute(ctypes.byref(value), MULTICAST, device),
    )
    return None if any(errors) else bool(value.value)


def _numa_node(pci_bus_id: str | None) -> int | None:
    """Return the NUMA node of a GPU such as 00000000:18:00.0 (0000:18:00.0 to the kernel)."""
    path = PCI_DEVICES / (pci_bus_id or "")[4:].lower() / "numa_node"
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _smi(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=SMI_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return STYLES.sub("", done.stdout).strip() if done.returncode == 0 else None
