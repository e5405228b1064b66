"""The resource that limits a step: the one without which it would be shortest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lab.model.profile import Profile
from lab.simulate.hardware import Hardware, Link
from lab.simulate.step import simulate
from lab.simulate.strategy import Strategy

FREE_LINK = 1e18  # bytes per second: no message takes time
FREE_CODEC = 1e18


def _links(hardware: Hardware, **changes: float) -> Hardware:
    def changed(link: Link | None) -> Link | None:
        return replace(link, **changes) if link else None

    rates = () if "bandwidth_bytes_per_s" in changes else hardware.node_rates
    return replace(
        hardware, intra=changed(hardware.intra), inter=changed(hardware.inter), node_rates=rates
    )


# Hardware without one of its limits. "host" is all that a rank does besides model and exchange.
RELIEFS: dict[str, Callable[[Hardware], Hardware]] = {
    "latency": lambda hardware: _links(hardware, latency_s=0.0),
    "bandwidth": lambda hardware: _links(hardware, bandwidth_bytes_per_s=FREE_LINK),
    "codec": lambda hardware: replace(
        hardware, codec_bytes_per_s=FREE_CODEC, codec_rates=(), codec_s=0.0
    ),
    "host": lambda hardware: replace(
        hardware,
        overhead_s=0.0,
        overhead_s_per_rank=0.0,
        update_bytes_per_s=None,
        input_samples_per_s=None,
        reduce_bytes_per_s=None,
    ),
    "stragglers": lambda hardware: replace(hardware, jitter=0.0, num_slow=0),
}


def limit(
    profile: Profile,
    hardware: Hardware,
    strategy: Strategy,
    world_size: int,
    per_rank_batch_size: int,
) -> tuple[str, float]:
    """Name what limits a step, and the share of the step that goes if it takes no time.

    Returns:
        "compute" (forward and backward), or a key of RELIEFS.
    """
    point = strategy, world_size, per_rank_batch_size
    now_s = simulate(profile, hardware, *point).step_s
    without = {
        name: simulate(profile, relief(hardware), *point).step_s for name, relief in RELIEFS.items()
    }
    without["compute"] = simulate(profile.scaled(time_scale=0.0), hardware, *point).step_s
    name = min(without, key=lambda each: without[each])
    return name, 1 - without[name] / now_s
