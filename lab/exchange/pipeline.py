"""Pipelining of chunks: while one chunk is added, the next one travels."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator

from torch import Tensor

from lab.distributed.collective import Handle
from lab.distributed.comm import Comm, Transfer
from lab.exchange.chunks import LAG
from lab.exchange.grouping import MIB

Tick = tuple[list[Transfer], list[Transfer]]  # one rank's simultaneous sends and receives


def run(comm: Comm, *schedules: Iterator[Tick]) -> None:
    """Run this rank's `schedules`, iterators over equally many ticks, at the same time.

    When a schedule is asked for tick t, the transfers of tick t-LAG are done: it may read received
    tensors and overwrite sent ones. Transfers of the ticks in between are still under way.

    Ranks share one clock: a tensor sent at a tick must be received at the same tick. So the batches
    of all ranks match one by one, and ranks cannot wait for each other in a circle, even where a
    rank's batches run one after the other, as under NCCL.
    """
    under_way: deque[Handle] = deque()
    for ticks in zip(*schedules, strict=True):
        sends = [transfer for leaving, _ in ticks for transfer in leaving]
        receives = [transfer for _, arriving in ticks for transfer in arriving]
        under_way.append(comm.isend_irecv(sends, receives))
        if len(under_way) == LAG:
            under_way.popleft().wait()
    for handle in under_way:
        handle.wait()


def num_chunks(flat: Tensor, chunk_mb: float | None) -> int:
    """Return how many chunks of at most `chunk_mb` MiB `flat` has; None: one."""
    return 1 if chunk_mb is None else max(1, math.ceil(flat.nbytes / (chunk_mb * MIB)))
