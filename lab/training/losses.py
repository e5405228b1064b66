"""Losses of steps, read one step late, and the error of a non-finite one."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import torch
from torch import Tensor

from lab.distributed.sharded import local


class Losses:
    """Copies of each step's loss to the host, made while the next step is queued: no host waits.

    The loss becomes NaN if an exchange found non-finite gradients: one check covers both.

    Attributes: read: the losses that have been read, in the order of steps.
    """

    def __init__(self) -> None:
        self.read = array("d")
        self._coming: tuple[Tensor, torch.cuda.Event | torch.Event | None] | None = None

    def append(self, loss: Tensor, *finite: Tensor | None) -> None:
        """Begin to copy a step's loss to the host.

        Args:
            loss: float32 [], overwritten.
            finite: bool [], whether gradients were finite; None: not checked.
        """
        self.read_last()
        for found in finite:
            if found is not None:
                loss.masked_fill_(found.logical_not(), torch.nan)
        copy = loss.to("cpu", non_blocking=True)  # from a GPU into pinned memory
        on_gpu = loss.device.type == "cuda"
        ready = torch.cuda.current_stream(loss.device).record_event() if on_gpu else None
        self._coming = copy, ready

    def read_last(self) -> float | None:
        """Return the loss appended last, once the device has computed it; None if it was read."""
        if self._coming is None:
            return None
        (copy, ready), self._coming = self._coming, None
        if ready is not None:
            ready.synchronize()
        self.read.append(float(copy))
        return self.read[-1]


def overflow(step: int, tensors: Iterable[tuple[str, Tensor]]) -> FloatingPointError:
    """Return the error of a step, counted from 0; it names the first tensor that is not finite.

    If none is finite, the first one cannot be told.
    """
    everything = list(tensors)
    bad = [name for name, tensor in everything if not local(tensor).isfinite().all()]
    first = f", first in {bad[0]}" if bad else ""
    where = ", in all parameters" if len(bad) == len(everything) else first
    return FloatingPointError(f"gradient not finite at step {step}{where}; try a smaller optim.lr")
