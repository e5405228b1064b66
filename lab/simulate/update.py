"""The optimizer's update in a prediction: what of its time a profile contains already."""

from __future__ import annotations

import math

from lab.model.profile import Profile
from lab.simulate.hardware import Hardware
from lab.simulate.strategy import Strategy
from lab.sync.pattern import MOMENTUM, Update


def update_beside(profile: Profile, hardware: Hardware, update: Update) -> tuple[Update, float]:
    """Return the passes over memory that are beside a profile's times, and their rate.

    A measured step contains an update with SGD, of all weights even if each rank updates its part
    alone. What other optimizers read and write beyond that is beside it, or comes off.

    Returns:
        passes: may be negative. rate: bytes per second; infinite: not known, so they take no time.
    """
    if profile.update_bytes_per_s is not None:
        return update, profile.update_bytes_per_s
    if profile.rest_ms is None and hardware.update_bytes_per_s is not None:
        return update, hardware.update_bytes_per_s
    difference = update.passes - MOMENTUM.passes
    return Update(difference, difference, update.copies), _rate(profile, hardware)


def _rate(profile: Profile, hardware: Hardware) -> float:
    if hardware.update_bytes_per_s is not None:
        return hardware.update_bytes_per_s
    num_bytes = MOMENTUM.passes * profile.gradient_bytes
    return hardware.device.rate_of(num_bytes) if hardware.device else math.inf


def told(optim: str, profile: Profile, hardware: Hardware, strategy: Strategy) -> str:
    """Say how an optimizer other than SGD counts beside a measured profile.

    Args:
        optim: its path.
    """
    contained = f"{profile.name} is taken to contain an update with SGD"
    if strategy.update is None:
        return f"optim={optim}: its update is not priced, as its passes are not known; {contained}"
    beside, rate = update_beside(profile, hardware, strategy.update)
    if beside == strategy.update:
        return ""
    told = f"optim={optim}: {strategy.update.passes:g} passes over memory in an update; {contained}"
    told += f", of {MOMENTUM.passes:g}; the difference is "
    if math.isinf(rate):
        return f"{told}not priced: set hardware.update_bytes_per_s="
    seconds = beside.passes * profile.gradient_bytes / rate
    return f"{told}{1e3 * seconds:+.2f} ms, at {rate / 1e9:.4g} GB/s"
