"""Stages and memory of exchanges that leave a direction, for their cost cards."""

from __future__ import annotations

import math

from lab.exchange import owners
from lab.exchange.compressible import rank_of
from lab.simulate.load import Load, Settings, Shape, Sizes


def onebit_adam(load: Load) -> None:
    """Count the passes of a step with a frozen variance: momentum, signs, correction, decoding."""
    message = sum(_blocks(shape, load.exchange["block_size"], load.N) for shape in load.shapes)
    load.codec((12 + 16 + 12) * load.n + message, 2 * len(load.shapes))
    load.wire(load.network.all_to_all(message / load.N))
    load.codec((8 * load.N + 12 + 12) * load.n / load.N + message, 2 * len(load.shapes))
    load.wire(load.network.all_gather(message / load.N))
    load.codec(4 * load.n + message, 2 * len(load.shapes))


def _blocks(shape: Shape, block_size: int, size: int) -> int:
    """Count the bytes of a parameter's blocks in the lines of a message, as blocks.py cuts them."""
    rows, rest = divmod(math.prod(shape), block_size)
    whole = math.ceil(rows / size) * (math.ceil(block_size / 8) + 8)
    return size * (whole + (math.ceil(rest / 8) + 8 if rest else 0))


def onebit_adam_kept(s: Sizes, adam: Settings) -> float:
    """Count moments and residuals of a frozen variance, whole and in shards, and four messages."""
    of_message = s.n * (1 / 8 + 8 / adam["block_size"])
    return 4 * s.n * (2 + 2 / s.N) + of_message * (3 + 1 / s.N)


def muon(load: Load) -> None:
    """Count copies to and from a message, the moments, and Newton–Schulz of each rank's matrices.

    Lines of a message are as long as the fullest.
    """
    shapes = {str(number): shape for number, shape in enumerate(load.shapes)}
    matrices = owners.hidden_matrices(shapes, ())
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
    matrices = list(owners.hidden_matrices(shapes, ()).values())
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
