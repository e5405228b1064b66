"""The peak of memory since a moment: resident on CPUs, of tensors on GPUs."""

from __future__ import annotations

from pathlib import Path

import torch

# Linux's own mark of resident memory, VmHWM, which writing 5 to clear_refs resets.
CLEAR, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


def reset_peak(device: torch.device) -> None:
    """Reset the peak to the memory in use now.

    Raises:
        OSError: this system cannot reset it.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        CLEAR.write_text("5")


def peak_bytes(device: torch.device) -> int:
    """Return the highest use in bytes since `reset_peak`."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    lines = STATUS.read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
