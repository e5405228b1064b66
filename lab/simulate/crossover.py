"""Find the batch size, or the rate of links, at which one strategy overtakes another."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace

from lab.model.profile import Profile
from lab.simulate.hardware import Hardware, Link
from lab.simulate.step import simulate
from lab.simulate.strategy import CEILING, Strategy

LARGEST_BATCH = 2**20
RATES = (1e5, 1e13)  # bytes per second: the range that is searched
CLOSE = 1.001  # factor to which the rate is determined
MARGIN = 1.05  # factor; strategies within it count as equally fast


def crossover_batch(
    profile: Profile, hardware: Hardware, strategy: Strategy, world_size: int
) -> int | None:
    """Find the smallest global batch that `world_size` ranks train faster than one rank does.

    Only multiples of `world_size` are tried; None if none up to LARGEST_BATCH is faster. If a
    batch pays, every larger one is assumed to pay.
    """

    def pays(per_rank: int) -> bool:
        alone = simulate(profile, hardware, CEILING, 1, per_rank * world_size)
        return simulate(profile, hardware, strategy, world_size, per_rank).step_s < alone.step_s

    largest = LARGEST_BATCH // world_size
    if not pays(largest):
        return None
    return world_size * (1 + bisect_left(range(1, largest), True, key=pays))


def crossover_rate(
    profile: Profile,
    hardware: Hardware,
    strategies: tuple[Strategy, Strategy],
    world_size: int,
    batch_size: int,
) -> float | None:
    """Find the link rate in bytes per second below which the first strategy is MARGIN faster.

    Args:
        strategies: the first is meant for slow links, such as one that compresses.
        batch_size: global.

    Returns:
        None if the first is faster at both ends of RATES, or at neither.
    """

    def pays(rate: float) -> bool:
        links = with_rate(hardware, rate)
        per_rank = batch_size // world_size
        one, other = (simulate(profile, links, each, world_size, per_rank) for each in strategies)
        return MARGIN * one.step_s < other.step_s

    low, high = RATES
    if not pays(low) or pays(high):
        return None
    while high / low > CLOSE:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if pays(middle) else (low, middle)
    return high


def with_rate(hardware: Hardware, rate: float) -> Hardware:
    """Return the hardware with another rate of its slowest links (see `slowest`).

    Args:
        rate: bytes per second.
    """
    kind = "inter" if hardware.inter else "intra"
    return replace(hardware, **{kind: replace(slowest(hardware), bandwidth_bytes_per_s=rate)})


def slowest(hardware: Hardware) -> Link:
    """Return the slowest kind of links: those between nodes if there are any."""
    link = hardware.inter or hardware.intra
    assert link is not None  # hardware of more than one rank has links
    return link
