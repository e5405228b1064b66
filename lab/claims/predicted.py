"""Predict facts (lab.claims.metrics) of a profile on some hardware by the cost model."""

from __future__ import annotations

from functools import cache

from lab.claims.metrics import Missing, Point
from lab.model.facts import Counts
from lab.model.profile import Profile
from lab.settings.config import load
from lab.settings.files import read_file
from lab.settings.overrides import own_choices
from lab.simulate.crossover import with_rate
from lab.simulate.hardware import Hardware
from lab.simulate.step import simulate
from lab.simulate.strategy import Strategy

FULLY_CONNECTED = "fc"  # prefix of such layers' names, the only sign of their kind in a profile


class Predicted:
    """Facts by the cost model.

    Args:
        profile: the paper's, a file of conf/profile; a point may name another.
        hardware: the model runs on it.
        bytes_scale: multiplies the parameters of all profiles.
        counts: of the paper's network; None: as far as the profile gives them.
        place: where in their ranges the values lie that profiles assume; None: as they are given.

    Raises:
        ConfigError: there is no such file.
    """

    def __init__(
        self,
        profile: str,
        hardware: Hardware,
        bytes_scale: float = 1.0,
        counts: Counts | None = None,
        place: float | None = None,
    ) -> None:
        self.profile, self.hardware, self.bytes_scale = profile, hardware, bytes_scale
        self._counts, self._place = counts, place

    def __str__(self) -> str:
        scale = "" if self.bytes_scale == 1 else f" with {self.bytes_scale:g} of its bytes"
        return f"profile {self.profile}{scale} on {self.hardware.name}"

    def step_s(self, at: Point) -> float:
        """Return the seconds of a step."""
        return self._step(at)[0]

    def payload_bytes(self, at: Point) -> float:
        """Return the bytes that the busiest rank sends in a step."""
        return self._step(at)[1]

    def counts(self) -> Counts:
        """Return the counts of the network, or else of the profile before it is scaled.

        In a profile without a layer named fc…, kinds are unknown.
        """
        if self._counts:
            return self._counts
        layers = profile_of(self.profile).layers
        connected = [x.parameters for x in layers if x.name.startswith(FULLY_CONNECTED)]
        return Counts(sum(x.parameters for x in layers), sum(connected) if connected else None)

    def at_rate(self, rate: float) -> Predicted:
        """Predict the same for links that carry `rate` bytes per second."""
        return Predicted(self.profile, with_rate(self.hardware, rate), self.bytes_scale)

    def _step(self, at: Point) -> tuple[float, float]:
        if at.batch_size % at.world_size:
            raise Missing(f"{at.world_size} ranks cannot share a batch of {at.batch_size}")
        per_rank_batch = at.batch_size // at.world_size
        profile = profile_of(at.profile or self.profile, self.bytes_scale)
        if self._place is not None:
            profile = profile.drawn(self._place)
        strategy = strategy_of(at.strategy)
        hardware = self.hardware
        if at.rate_gbit is not None:
            hardware = with_rate(hardware, at.rate_gbit * 1e9 / 8)
        try:
            step = simulate(profile, hardware, strategy, at.world_size, per_rank_batch)
        except ValueError as error:
            raise Missing(str(error)) from None
        return step.step_s, step.payload_bytes


# Cached: reading settings takes longer than simulating a step.
@cache
def profile_of(name: str, bytes_scale: float = 1.0) -> Profile:
    """Read a file of conf/profile. ConfigError: there is none."""
    return Profile.parse(read_file("profile", name)).scaled(bytes_scale)


@cache
def strategy_of(name: str) -> Strategy:
    """Compose `strategy=name`. ConfigError: there is none; ValueError: it has no cost model."""
    return Strategy.of(load(own_choices([f"strategy={name}"])))
