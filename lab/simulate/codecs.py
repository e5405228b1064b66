"""Stages of exchanges that encode: the memory passes of each codec, and its messages."""

from __future__ import annotations

from lab.exchange import compressible
from lab.simulate.load import Load


def all_reduce(load: Load) -> None:
    if load.exchange["dtype"] == "float32" or load.N == 1:  # one rank keeps what it has
        load.wire(load.exact(load.n))
        return
    half, cast = load.num_bytes / 2, 1.5 * load.num_bytes
    load.codec(cast)
    load.wire(load.network.all_reduce(half))
    load.codec(cast)


def randomk(load: Load) -> None:
    """Count the memory passes of lab/codec/randomk.py."""
    sent = sum(compressible.num_sent(shape, load.exchange["ratio"]) for shape in load.shapes)
    load.codec(12 * load.n + 8 * sent, in_torch=16 * load.n + 160 * sent)
    load.wire(load.exact(sent))
    load.codec(4 * load.n + 12 * sent, in_torch=4 * load.n + 160 * sent)


def powersgd(load: Load) -> None:
    """Count the memory passes of lab/codec/low_rank.py over matrices; their factors are small."""
    rank = load.exchange["rank"]
    low = [matrix for shape in load.shapes if (matrix := compressible.low_rank(shape, rank))]
    n = sum(rows * columns for rows, columns in low)
    load.codec(12 * n, in_torch=16 * n)
    load.wire(load.exact(load.n - n) + load.exact(rank * sum(rows for rows, _ in low)))
    load.codec(12 * n)
    load.wire(load.exact(rank * sum(columns for _, columns in low)))
    load.codec(4 * n)
