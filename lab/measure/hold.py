"""Work for a GPU to do while the host queues what is to be timed behind it."""

from __future__ import annotations

import warnings

import torch

CYCLES_PER_S = 3e9  # of the fastest GPUs' clocks: a slower one holds longer
SLACK = 1.5
LONGEST_S = 0.1


def hold(launch_s: float) -> None:
    """Keep the current stream busy while the host queues what takes it about `launch_s`.

    It is held a little longer, but never beyond LONGEST_S. What was queued meanwhile then runs
    without gaps: it lasts as long as its kernels, and not as long as the host takes to launch them.
    """
    sleep = getattr(torch.cuda, "_sleep", None)  # private, so it may go
    if sleep is None:
        warnings.warn("torch.cuda._sleep is gone: times may hold launches", stacklevel=2)
        return
    sleep(int(min(SLACK * launch_s, LONGEST_S) * CYCLES_PER_S))
