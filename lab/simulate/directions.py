"""Stages and memory of exchanges that leave a direction, for their cost cards."""

from __future__ import annotations

import math

from lab.exchange import owners
from lab.exchange.compressible import rank_of
from lab.simulate.load import Load, Settings, Shape, Sizes


def onebit_adam(load: Load) -> None:
    """Count the passes of a step with a frozen variance: momentum, signs, correction, decoding."""
    if load.exchange["signs_of"] == "momentum":
        _signed(load, before=12 + 16, of_shard=12, after=0)
    else:
        _signed(load, before=16, of_shard=12, after=12 + 8)


def onebit_lamb(load: Load) -> None:
    """Count 1-bit Adam's passes, norms of directions and weights, and a product."""
    _signed(load, before=16, of_shard=12, after=12 + 8 + 8 + 8)


def zero_one_adam(load: Load) -> None:
    """Count the passes of a step in signs, as all are once the variance is frozen."""
    _signed(load, before=12, of_shard=0, after=12 + 12 + 12 + 8)


def _signed(load: Load, before: int, of_shard: int, after: int) -> None:
    """Count a sum of blocks in signs, and what an optimizer adds around it.

    Args:
        before, of_shard, after: bytes for a value, of a shard between both stages.
    """
    message = sum(_blocks(shape, load.exchange["block_size"], load.N) for shape in load.shapes)
    load.codec((before + 12) * load.n + message, 2 * len(load.shapes))
    load.wire(load.network.all_to_all(message / load.N))
    load.codec((8 * load.N + of_shard + 12) * load.n / load.N + message, 2 * len(load.shapes))
    load.wire(load.network.all_gather(message / load.N))
    load.codec((4 + after) * load.n + message, 2 * len(load.shapes))


def _blocks(shape: Shape, block_size: int, size: int) -> int:
    """Count the bytes of a parameter's blocks in the lines of a message, as blocks.py cuts them."""
    rows, rest = divmod(math.prod(shape), block_size)
    whole = math.ceil(rows / size) * (math.ceil(block_size / 8) + 8)
    return size * (whole + (math.ceil(rest / 8) + 8 if rest else 0))


def onebit_adam_kept(s: Sizes, adam: Settings) -> float:
    """Count momentum and residual, the shard's variance and residual, and four messages."""
    return 4 * s.n * (2 + 2 / s.N) + _messages(s, adam)


def zero_one_adam_kept(s: Sizes, adam: Settings) -> float:
    """Count momentum, residual and root, the shard's residual, and four messages."""
    return 4 * s.n * (3 + 1 / s.N) + _messages(s, adam)


def _messages(s: Sizes, adam: Settings) -> float:
    """Count the bytes sent, in whose memory all sums arrive, received, and of the shard's sum."""
    return s.n * (1 / 8 + 8 / adam["block_size"]) * (2 + 1 / s.N)


def muon(load: Load) -> None:
    """Count copies to and from a message, the moments, and Newton–Schulz of each rank's matrices.

    Lines of a message are as long as the fullest.
    """
    shapes = {str(number): shape for number, shape in enumerate(load.shapes)}
    matrices = owners.hidden_matrices(shapes)
    steps = load.exchange["steps"]
    costs = {n: owners.newton_schulz_operations(*m, steps) for n, m in matrices.items()}
    owner = owners.balanced(costs, load.N)
    operations = [0.0] * load.N
    for name, rank in owner.items():
        operations[rank] += costs[name]
    _, values = owners.lines(shapes, owner, load.N)
    line = 4 * values
    load.codec(8 * load.n)
    load.wire(load.network.all_to_all(line))
    load.codec(12 * load.n)
    load.products(operations)
    load.wire(load.network.all_gather(line))
    load.codec(8 * load.n)


def dion(load: Load) -> None:
    """Count the passes over momentum, gradients and directions, and the factors that are sent.

    Orthonormalising P is work of the device, and left out.
    """
    shapes = {str(number): shape for number, shape in enumerate(load.shapes)}
    matrices = list(owners.hidden_matrices(shapes).values())
    n = sum(rows * columns for rows, columns in matrices)
    ranks = [rank_of(*matrix, load.exchange["rank_fraction"]) for matrix in matrices]
    left = sum(r * rows for r, (rows, _) in zip(ranks, matrices, strict=True))
    right = sum(r * columns for r, (_, columns) in zip(ranks, matrices, strict=True))
    load.codec(16 * n)
    load.wire(load.exact(load.n - n + left))
    load.codec(12 * n)
    load.wire(load.exact(right))
    load.codec(4 * n + 32 * (load.n - n))


def dion_kept(s: Sizes, dion: Settings) -> float:
    """Count momentum, and Q and R of the longer side; P is of the shorter one, and left out."""
    return 4 * s.n * (1 + 2 * dion["rank_fraction"])


def muon_kept(s: Sizes, muon: Settings) -> float:
    """Count sent and received lines, and momentum; one matrix alone is all its owner's."""
    if s.gathered:
        return 8 * s.n + 4 * s.n / s.N
    return 8 * s.n * s.N + (0 if s.rank else 4 * s.n)
