"""The implementations that oneDNN, the CPU's library of layers, has chosen."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable

import torch

# Fields of a line of its log: version, "primitive", "exec", engine, primitive, implementation.
MARK, KIND, IMPLEMENTATION = "onednn_verbose", "exec", 6


def implementations(call: Callable[[], object]) -> list[str]:
    """Return what oneDNN ran during a call, in order, as in "jit:avx2"; empty: it was not asked.

    oneDNN prints from C, so the process's standard output goes to a file meanwhile.
    """
    sys.stdout.flush()
    kept = os.dup(1)
    with tempfile.TemporaryFile("w+") as log:
        os.dup2(log.fileno(), 1)
        try:
            with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
                call()
        finally:
            os.dup2(kept, 1)
            os.close(kept)
        log.seek(0)
        lines = [line.split(",") for line in log]
    return [
        fields[IMPLEMENTATION]
        for fields in lines
        if fields[0] == MARK and KIND in fields and "convolution" in fields
    ]
