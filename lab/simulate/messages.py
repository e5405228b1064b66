"""Messages of a step: buckets of parameters, and parts of large ones that travel by themselves."""

from __future__ import annotations

import math
from collections.abc import Container

from lab.exchange.cost import Shape
from lab.exchange.grouping import cut, group
from lab.model.profile import VALUE_BYTES, Profile, shapes
from lab.simulate.costs import exchange_of
from lab.simulate.strategy import Strategy
from lab.sync.pattern import fragments

Bucket = dict[str, Shape]  # shapes of parameters by name, or of parts: name[start:stop]


def messages_of_fragments(
    profile: Profile, strategy: Strategy, on_gpu: bool = False
) -> list[list[Bucket]]:
    """Divide a profile's parameters among fragments, and each of these among messages.

    Args:
        on_gpu: gradients lie on GPUs.

    Raises:
        ValueError: the profile has fewer layers than the strategy has fragments.
    """
    pattern = strategy.pattern
    if pattern.waits_in_forward:
        return [_chunks(profile, strategy, on_gpu)]
    if pattern.fragments == 1:
        return [buckets(profile, strategy.bucket_mb, on_gpu)]
    sizes = [(name, VALUE_BYTES * math.prod(shape)) for name, shape in parameters(profile).items()]
    parts = fragments(sizes, pattern.fragments, pattern.fragment_order)
    return [buckets(profile, strategy.bucket_mb, on_gpu, names) for names in parts]


def buckets(
    profile: Profile,
    bucket_mb: float | None,
    on_gpu: bool = False,
    only: Container[str] | None = None,
) -> list[Bucket]:
    """Divide a profile's parameters, or `only` some, among buckets: shapes of each, by name."""
    known = parameters(profile)
    arriving = [
        (name, VALUE_BYTES * math.prod(known[name]))
        for name in reversed(known)
        if only is None or name in only
    ]
    planned = group(arriving, bucket_mb, profile.bytes_scale, on_gpu)
    return [{name: known[name] for name in names} for names in planned]


def parameters(profile: Profile) -> Bucket:
    """Return the shapes of a profile's parameters by name, in the order of forward."""
    return {
        f"{layer.name}.{kind}": shape
        for layer in profile.layers
        for kind, shape in shapes(profile.values(layer)).items()
    }


def parameter_of(message_part: str) -> str:
    """Return the name of the parameter that a key of a Bucket is, or is a part of."""
    return message_part.partition("[")[0]


def _chunks(profile: Profile, strategy: Strategy, on_gpu: bool) -> list[Bucket]:
    """Return buckets of at most `chunk_mb`, and larger parameters in parts, if sums allow it."""
    planned = buckets(profile, strategy.chunk_mb, on_gpu)
    if not exchange_of(strategy.exchange).takes_divided:  # it does more than add values
        return planned
    chunks: list[Bucket] = []
    for bucket in planned:
        parts = _cut(bucket, strategy.chunk_mb, profile.bytes_scale) if len(bucket) == 1 else []
        chunks += parts if len(parts) > 1 else [bucket]
    return chunks


def _cut(alone: Bucket, chunk_mb: float | None, bytes_scale: float) -> list[Bucket]:
    ((name, shape),) = alone.items()
    parts = cut(math.prod(shape), chunk_mb, bytes_scale)
    return [{f"{name}[{part.start}:{part.stop}]": (len(part),)} for part in parts]
