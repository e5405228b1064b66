"""Helpers that several tests share."""

import os

from lab.distributed.world import is_available

# Kernels for GPUs run in Triton's interpreter where there is none; it asks when it is imported,
# which some of torch does, too.
if not is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# A longer run hangs. Beside busy processes on a slow machine, two cells have taken five minutes.
HANG_S = 600.0
