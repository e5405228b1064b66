"""Settings that change nothing in a run, in words: a strategy must not seem to act where it cannot.

Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lab.exchange.grouping import MIB
from lab.sync.pattern import Begin, Pattern


def idle(
    pattern: Pattern,
    *,
    strategy: str,
    world_size: int,
    num_steps: int,
    bucket_mb: float | None,
    accumulate: int,
    bucket_bytes: Sequence[int],
) -> list[str]:
    """List what does nothing, or less than its name says. Each line names a setting and the cause.

    Args:
        bucket_bytes: size of each bucket; empty if a library plans them.
    """
    if not pattern.legs:  # none: it exchanges nothing on purpose
        return []
    if world_size == 1:
        return [f"one rank: strategy={strategy} has nothing to exchange"]
    return [
        *_of_buckets(pattern, bucket_mb, bucket_bytes),
        *_of_steps(pattern, num_steps, accumulate, bucket_bytes),
    ]


def _of_buckets(
    pattern: Pattern, bucket_mb: float | None, bucket_bytes: Sequence[int]
) -> Iterator[str]:
    if len(bucket_bytes) != 1:
        return
    size = f"all {bucket_bytes[0] / 1e6:.3g} MB of gradients are one bucket"
    if pattern.begins is Begin.DURING_BACKWARD:
        smaller = f"bucket_mb={bucket_bytes[0] / MIB / 4:.2g} divides them"
        yield f"overlap=true: nothing overlaps: {size}, full only when backward ends; {smaller}"
    elif bucket_mb is not None:
        yield f"bucket_mb={bucket_mb:g}: divides nothing: {size}"


def _of_steps(
    pattern: Pattern, num_steps: int, accumulate: int, bucket_bytes: Sequence[int]
) -> Iterator[str]:
    if pattern.begins is Begin.DURING_BACKWARD and accumulate > 1 and len(bucket_bytes) != 1:
        yield f"accumulate={accumulate}: exchanges overlap the last micro-batch's backward alone"
    if num_steps < pattern.every:
        yield f"sync.every={pattern.every}: ranks exchange once, after the last step ({num_steps})"
