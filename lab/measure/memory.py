"""The memory that training uses."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

# Linux's own mark of resident memory, VmHWM, which writing 5 to clear_refs resets.
CLEAR, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


class PeakMemory:
    """Peak memory of steady steps.

    On a GPU torch's allocator keeps a peak that can be reset, so warm-up, evaluations and
    checkpoints do not count. On a CPU it is the process's peak resident set since its start.

    Attributes: is_running: steady steps are under way.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._steady_bytes = 0
        self.is_running = False

    def resume(self) -> None:
        """Start counting: steady steps follow."""
        if not self.is_running and self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        self.is_running = True

    def pause(self) -> None:
        """Stop counting: an evaluation, a checkpoint or the like follows."""
        if self.is_running and self._device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._device)
            self._steady_bytes = max(self._steady_bytes, peak)
        self.is_running = False

    @property
    def kind(self) -> str:
        """Describe what the peak covers."""
        if self._device.type == "cuda":
            return "tensors, in steady steps"
        return "resident set of the process, since its start"

    def sizes(self) -> tuple[int, int, int]:
        """Return bytes: the peak, those reserved by torch's allocator, those in use on the device.

        The last counts all processes on the device, with their contexts and NCCL's buffers. On a
        CPU only the peak is measured; the others are 0.
        """
        if self._device.type != "cuda":
            unit = 1 if sys.platform == "darwin" else 1024
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, 0, 0
        free, total = torch.cuda.mem_get_info(self._device)
        return self._steady_bytes, torch.cuda.memory_reserved(self._device), total - free


def reset_peak(device: torch.device) -> None:
    """Reset the peak to the memory in use now.

    Raises:
        OSError: this system cannot reset it.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        CLEAR.write_text("5", encoding="utf-8")


def peak_bytes(device: torch.device) -> int:
    """Return the highest use in bytes since `reset_peak`."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    lines = STATUS.read_text(encoding="utf-8").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
