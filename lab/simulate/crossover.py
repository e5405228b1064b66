"""Where one way of training overtakes another: in the size of a batch, and in the rate of links."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lab.model.profile import Profile
from lab.simulate.hardware import Hardware, Link
from lab.simulate.step import CEILING, Strategy, simulate

LARGEST_BATCH = 2**20
RATES = (1e5, 1e13)  # bytes per second between which links are searched
CLOSE = 1.001  # factor to which a rate is found
MARGIN = 1.05  # where nothing is left to hide, strategies are equal up to this


def crossover_batch(
    profile: Profile, hardware: Hardware, strategy: Strategy, world_size: int
) -> int | None:
    """The smallest global batch that `world_size` ranks train faster than one rank does.

    Only multiples of `world_size`; None if there is none up to LARGEST_BATCH. A larger batch is
    taken to pay wherever a smaller one does.
    """

    def pays(own: int) -> bool:
        alone = simulate(profile, hardware, CEILING, 1, own * world_size)
        return simulate(profile, hardware, strategy, world_size, own).step_s < alone.step_s

    own = _first(pays, 1, LARGEST_BATCH // world_size)
    return None if own is None else own * world_size


def crossover_rate(
    profile: Profile,
    hardware: Hardware,
    strategies: tuple[Strategy, Strategy],
    world_size: int,
    batch_size: int,
) -> float | None:
    """The rate of the links, in bytes per second, below which the first strategy is MARGIN faster.

    Args:
        strategies: the first is meant for slow links, such as one that compresses.
        batch_size: global.

    Returns:
        None if that is so, or is not so, at both ends of RATES.
    """

    def pays(rate: float) -> bool:
        links = with_rate(hardware, rate)
        own = batch_size // world_size
        one, other = (simulate(profile, links, each, world_size, own) for each in strategies)
        return MARGIN * one.step_s < other.step_s

    low, high = RATES
    if not pays(low) or pays(high):
        return None
    while high / low > CLOSE:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if pays(middle) else (low, middle)
    return high


def with_rate(hardware: Hardware, rate: float) -> Hardware:
    """The same with another rate of its slowest kind of links, those between nodes if it has any.

    Args:
        rate: bytes per second.
    """
    kind = "inter" if hardware.inter else "intra"
    return replace(hardware, **{kind: replace(slowest(hardware), bandwidth_bytes_per_s=rate)})


def slowest(hardware: Hardware) -> Link:
    """Return the slowest kind of links: those between nodes if there are any."""
    link = hardware.inter or hardware.intra
    assert link is not None  # or there would be one rank
    return link


def _first(holds: Callable[[int], bool], low: int, high: int) -> int | None:
    """The first of low..high for which `holds`, if it does for all that follow."""
    if not holds(high):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low
