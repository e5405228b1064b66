"""Rules for buckets, chunks, phases of a run and trees of ranks, without torch.

The trainer and the simulator both use them, so that what they send cannot differ.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from lab.settings.checks import is_number

MIB = 2**20  # the unit of bucket_mb and chunk_mb, as of DDP's bucket_cap_mb; MB is 10**6
FIRST_BUCKET_BYTES = MIB  # small, so that the first exchange starts early (as DDP does)
CUT_VALUES = 1024  # parts of a parameter begin at multiples: aligned for kernels and networks
VALUE_BYTES = 4  # of a float32
LARGE_BYTES = 4 * MIB  # from this size on, a CPU's copy into a bucket costs more than a message
LIBRARIES = ("gloo", "nccl")  # that differ in the cost of a message
LAG = 3  # ticks from a chunk's arrival until it may leave: see lab.exchange.paths.run_pipelined

Sized = tuple[str, float]  # a parameter's name and the bytes of its gradient
ChunkMB = float | Mapping[str, float | None] | None  # in MiB (2**20 bytes); None: no chunks


def group(
    parameters: Sequence[Sized],
    bucket_mb: float | None,
    bytes_scale: float = 1.0,
    on_gpu: bool = False,
) -> list[list[str]]:
    """Return the parameter names of each bucket, in the order in which backward fills them.

    On CPUs a parameter of LARGE_BYTES has a bucket to itself. A GPU copies it in microseconds, less
    than another message takes: there only those as large as `bucket_mb` have one.

    Args:
        parameters: in the order in which their gradients arrive.
        bucket_mb: see lab.exchange.bucket.plan.
        bytes_scale: size of these parameters relative to the ones they stand for, which decide the
            buckets.
        on_gpu: gradients lie on a GPU.
    """
    if not parameters:
        return []
    if bucket_mb is None:
        return [[name for name, _ in parameters]]
    if bucket_mb == 0:
        return _by_module(parameters)
    sized = [(name, size / bytes_scale) for name, size in parameters]
    return _by_size(sized, bucket_mb * MIB, on_gpu)


def cut(num_values: int, bucket_mb: float | None, bytes_scale: float = 1.0) -> list[range]:
    """Divide a parameter into parts of at most `bucket_mb`, about equal, in the order of memory.

    Bounds are multiples of CUT_VALUES. Arguments: see `group`.
    """
    if not bucket_mb:
        return [range(num_values)]
    parts = math.ceil(num_values * VALUE_BYTES / (bucket_mb * MIB * bytes_scale))
    length = CUT_VALUES * math.ceil(num_values / parts / CUT_VALUES)
    return [range(start, min(start + length, num_values)) for start in range(0, num_values, length)]


def _by_module(parameters: Sequence[Sized]) -> list[list[str]]:
    modules: dict[str, list[str]] = {}
    for name, _ in parameters:
        modules.setdefault(name.rpartition(".")[0], []).append(name)
    return list(modules.values())


def _by_size(parameters: Sequence[Sized], capacity: float, on_gpu: bool) -> list[list[str]]:
    few = min(capacity, LARGE_BYTES)
    large = capacity if on_gpu else few
    groups: list[list[str]] = []
    current: list[str] = []
    held = 0.0  # bytes in current
    # If the small ones are this few, the rest of backward could not hide a second message.
    little = sum(size for _, size in parameters if size < large) <= few
    room = few if little else min(capacity, FIRST_BUCKET_BYTES)
    for name, size in parameters:
        if size >= large:
            groups.append([name])
            continue
        # On GPUs the parameter that fills a bucket belongs to it, as in DDP: fewer messages.
        is_full = held >= room if on_gpu else held + size > room
        if current and is_full:
            groups.append(current)
            current, held, room = [], 0.0, capacity
        current.append(name)
        held += size
    if current:
        groups.append(current)
    # A bucket is ready with its last gradient, which decides its place in the queue.
    ready_at = {name: position for position, (name, _) in enumerate(parameters)}
    return sorted(groups, key=lambda names: ready_at[names[-1]])


def chunk_mb_over(chunk_mb: ChunkMB, backend: str) -> float | None:
    """Return the chunk size for `backend`; libraries other than NCCL have Gloo's.

    Gloo over loopback is fastest with small chunks; under NCCL each one costs the host a group of
    transfers.
    """
    if isinstance(chunk_mb, Mapping):
        return chunk_mb["nccl" if backend == "nccl" else "gloo"]
    return chunk_mb


def check_chunk_mb(chunk_mb: ChunkMB) -> None:
    """Check that chunks can have this size.

    Raises:
        ValueError: it is neither a number above 0, nor None, nor one of these for each library.
    """
    by_library = isinstance(chunk_mb, Mapping)
    sizes = list(chunk_mb.values()) if by_library else [chunk_mb]
    right = all(size is None or (is_number(size) and size > 0) for size in sizes)
    if not right or (by_library and set(chunk_mb) != set(LIBRARIES)):
        raise ValueError(
            f"exchange.chunk_mb={chunk_mb}: must be null, a number above 0, or a mapping with "
            f"such a value for each of {' and '.join(LIBRARIES)}"
        )


def checked_ends(until: Any, num_phases: int) -> list[float]:
    """Return where the phases of a Schedule but the last end; ValueError: `until` does not fit."""
    ends = list(until) if isinstance(until, Sequence) and not isinstance(until, str) else []
    steps = all(type(end) is int and end >= 1 for end in ends)
    shares = all(type(end) is float and 0 < end < 1 for end in ends)
    ordered = (steps or shares) and sorted(set(ends)) == ends
    if len(ends) != num_phases - 1 or not ordered:
        raise ValueError(
            f"exchange.until={until}: must be {num_phases - 1} increasing "
            f"number{'s' if num_phases > 2 else ''}, for {num_phases} exchanges: "
            "fractions of the run between 0 and 1, or step numbers of at least 1"
        )
    return ends


def phase_shares(until: Sequence[float]) -> list[float]:
    """Return each phase's share of the steps of a run; ValueError: its length is not known."""
    if not all(0 < end < 1 for end in until):
        raise ValueError(
            f"exchange.until={list(until)}: a prediction needs the length of the run; set "
            "steps=, or give fractions of the run, as in exchange.until=[0.5]"
        )
    return [end - start for start, end in pairwise([0, *until, 1])]


class Node(NamedTuple):
    """A rank's place in a tree: its parent, its children and its distance from the root."""

    parent: int | None
    children: list[int]
    depth: int


def binomial_node(rank: int, size: int) -> Node:
    """Return a rank's place in the binomial tree of `size` ranks, rooted at 0.

    Rank r's parent is r with its lowest set bit cleared. Children come in ascending order, which
    is the order in which their subtrees complete. Any size is allowed.
    """
    children, bit = [], 1
    while bit < size and not rank & bit:
        if rank + bit < size:
            children.append(rank + bit)
        bit *= 2
    return Node(rank - bit if rank else None, children, rank.bit_count())


def in_order_node(rank: int, size: int, tree: int) -> Node:
    """Return a rank's place in the first (`tree` 0) or second (1) of two trees of `size` ranks.

    The first binary tree numbers its nodes in order (left subtree, node, right subtree), and no
    node has a right child only, so even ranks are its leaves. The second is the first with every
    rank moved up by one, so odd ranks are its leaves. Neither is higher than log2(size).
    """
    position = (rank - tree) % size
    low, high = 0, size - 1
    path = [_root(low, high)]
    while path[-1] != position:
        low, high = (low, path[-1] - 1) if position < path[-1] else (path[-1] + 1, high)
        path.append(_root(low, high))
    halves = (low, position - 1), (position + 1, high)
    children = [(_root(*half) + tree) % size for half in halves if half[0] <= half[1]]
    parent = (path[-2] + tree) % size if len(path) > 1 else None
    return Node(parent, children, depth=len(path) - 1)


def _root(low: int, high: int) -> int:
    """Return the root of positions `low` (even) to `high`: odd and near the middle, if possible."""
    return low if low == high else low - 1 + 2 * ((high - low + 3) // 4)
