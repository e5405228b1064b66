"""Hold a GPU's stream while the host queues work to be timed behind it."""

from __future__ import annotations

import warnings

import torch

CYCLES_PER_S = 3e9  # the fastest GPUs' clocks; a slower one holds longer
SLACK = 1.5
LONGEST_S = 0.1


def hold(launch_s: float) -> None:
    """Keep the current stream busy for a little more than `launch_s`, at most LONGEST_S.

    Kernels queued meanwhile then run without gaps, so their time excludes the host's launches.
    """
    sleep = getattr(torch.cuda, "_sleep", None)  # private: a later torch may lack it
    if sleep is None:
        warnings.warn("torch.cuda._sleep is gone: times may hold launches", stacklevel=2)
        return
    sleep(int(min(SLACK * launch_s, LONGEST_S) * CYCLES_PER_S))
