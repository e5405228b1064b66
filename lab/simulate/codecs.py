"""Stages of exchanges that encode: the memory passes of each codec, and its messages."""

from __future__ import annotations

import math

from lab.exchange import compressible
from lab.model.profile import VALUE_BYTES
from lab.simulate.load import Load
from lab.simulate.network import Cost


def all_reduce(load: Load) -> None:
    if load.exchange["dtype"] == "float32" or load.N == 1:  # one rank keeps what it has
        load.wire(load.exact(load.n))
        return
    half, cast = load.num_bytes / 2, 1.5 * load.num_bytes
    load.codec(cast)
    load.wire(load.network.all_reduce(half))
    load.codec(cast)


def onebit(load: Load) -> None:
    onebit_sum(load)
    onebit_decode(load)


def onebit_sum(load: Load) -> None:
    """Count reads and writes as lab/benchmarks/codec.py does: gradient, residuals, message.

    There are three calls per matrix, as in lab/exchange/onebit.py: encode, sum and decode.
    """
    matrices, n, message = _quantised(load)
    exact = load.exact(load.n - n)
    if not n:
        load.wire(exact)
        return
    load.codec(12 * n + message, matrices)
    load.wire(exact + load.network.all_to_all(message / load.N))
    load.codec(12 * n / load.N + message, matrices)
    load.wire(load.network.all_gather(message / load.N))


def onebit_decode(load: Load) -> None:
    """Count what a rank reads and writes to decode the sums of all ranks."""
    matrices, n, message = _quantised(load)
    if n:
        load.codec(4 * n + message, matrices)


def onebit_message_bytes(load: Load) -> float:
    """Count the bytes from which the sums of all ranks are decoded."""
    _, n, message = _quantised(load)
    return message + VALUE_BYTES * (load.n - n)


def _quantised(load: Load) -> tuple[int, int, float]:
    """Return the number of matrices, and of their values, and the bytes of bits and scales."""
    rule = [load.exchange[key] for key in ("granularity", "block_size", "min_columns")]
    matrices = [matrix for shape in load.shapes if (matrix := compressible.quantised(shape, *rule))]
    n = sum(rows * columns for rows, columns in matrices)
    return len(matrices), n, sum(rows * (columns / 8 + 8) for rows, columns in matrices)


def int8(load: Load) -> None:
    """Count the memory passes of lab/codec/int8: values, and a byte for each."""
    n, N = load.n, load.N
    message = n * (1 + 8 / load.exchange["block_size"])
    load.codec(4 * n + message, in_torch=29 * n)
    load.wire(load.network.all_to_all(message / N))
    load.codec(message + message / N, in_torch=25 * n + 29 * n / N)
    load.wire(load.network.all_gather(message / N))
    load.codec(4 * n + message, in_torch=13 * n)


def int4(load: Load) -> None:
    """Count the memory passes of lab/codec/int4.py and of the residual."""
    kept = 62 * load.n if load.exchange["error_feedback"] else 0  # decoded again, and subtracted
    encode, decode, add = 50 * load.n + kept, 22 * load.n, 12 * load.n
    message = load.n * (1 / 2 + 8 / load.exchange["block_size"])
    load.codec(encode)
    load.wire(load.network.all_to_all(message / load.N))
    load.codec(decode + add + encode / load.N)
    load.wire(load.network.all_gather(message / load.N))
    load.codec(decode)


def signsgd(load: Load) -> None:
    """Count the memory passes of lab/codec/signs: gradient and residual are read twice."""
    least = load.exchange["min_values"]
    n = sum(math.prod(shape) for shape in load.shapes if compressible.signed(shape, least))
    load.codec(20 * n + n / 8, in_torch=48 * n)
    load.wire(load.exact(load.n - n) + (load.network.all_gather(n / 8) if n else Cost()))
    load.codec(4 * n + n / 8 * load.N, in_torch=8 * n * load.N)


LINE_BYTES = 64  # that a value alone moves, in each direction


def topk(load: Load) -> None:
    """Count the memory passes of lab/codec/topk: a candidate is read and written several times."""
    sent = sum(compressible.num_sent(shape, load.exchange["ratio"]) for shape in load.shapes)
    load.codec(12 * load.n + (2 * LINE_BYTES + 80) * sent, in_torch=40 * load.n)
    load.wire(load.network.all_gather(8 * sent))  # an int32 index and a value
    load.codec(4 * load.n + 8 * sent * load.N, in_torch=16 * sent * load.N)


def randomk(load: Load) -> None:
    """Count the memory passes of lab/codec/randomk."""
    sent = sum(compressible.num_sent(shape, load.exchange["ratio"]) for shape in load.shapes)
    load.codec(12 * load.n + 8 * sent, in_torch=16 * load.n + 160 * sent)
    load.wire(load.exact(sent))
    load.codec(4 * load.n + 12 * sent, in_torch=4 * load.n + 160 * sent)


def powersgd(load: Load) -> None:
    """Count the memory passes of lab/codec/powersgd over matrices; their factors are small."""
    rank = load.exchange["rank"]
    low = [matrix for shape in load.shapes if (matrix := compressible.low_rank(shape, rank))]
    n = sum(rows * columns for rows, columns in low)
    load.codec(12 * n, in_torch=16 * n)
    load.wire(load.exact(load.n - n) + load.exact(rank * sum(rows for rows, _ in low)))
    load.codec(12 * n)
    load.wire(load.exact(rank * sum(columns for _, columns in low)))
    load.codec(4 * n)
