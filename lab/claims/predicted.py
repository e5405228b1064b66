"""Facts (lab.claims.metrics) of a profile on some hardware, from the cost model."""

from __future__ import annotations

from functools import cache

from lab.claims.metrics import Missing, Point
from lab.model.profile import VALUE_BYTES, Profile
from lab.settings.config import load
from lab.settings.files import read_file
from lab.simulate.crossover import with_rate
from lab.simulate.hardware import Hardware
from lab.simulate.step import Strategy, simulate

CONV2_OPERATIONS = 2 * 96 * 27 * 27 * 5 * 5 * 256  # of one image; slide 8: C, H, W, R, S, K


class Predicted:
    """What the cost model says.

    Args:
        profile: a file of conf/profile, which points of other profiles stand beside.
        hardware: what it runs on.
        bytes_scale: of all profiles.

    Raises:
        ConfigError: there is no such file.
    """

    def __init__(self, profile: str, hardware: Hardware, bytes_scale: float = 1.0) -> None:
        self.profile, self.hardware, self.bytes_scale = profile, hardware, bytes_scale

    def step_s(self, at: Point) -> float:
        """Seconds of a step."""
        return self._step(at)[0]

    def payload_bytes(self, at: Point) -> float:
        """What the busiest rank sends in a step."""
        return self._step(at)[1]

    def gradient_bytes(self) -> float:
        """Of the profile's model, unscaled."""
        return VALUE_BYTES * sum(layer.parameters for layer in profile_of(self.profile).layers)

    def fc_share(self) -> float:
        """Of the profile's parameters, those of layers named fc."""
        sizes = {layer.name: layer.parameters for layer in profile_of(self.profile).layers}
        return sum(sizes[name] for name in sizes if name.startswith("fc")) / sum(sizes.values())

    def conv2_operations(self, batch_size: int) -> float:
        """Multiplications and additions of AlexNet's second convolution, forward."""
        return CONV2_OPERATIONS * batch_size

    def at_rate(self, rate: float) -> Predicted:
        """The same where links carry so many bytes per second."""
        return Predicted(self.profile, with_rate(self.hardware, rate), self.bytes_scale)

    def _step(self, at: Point) -> tuple[float, float]:
        if at.batch_size % at.world_size:
            raise Missing(f"{at.world_size} ranks cannot share a batch of {at.batch_size}")
        own = at.batch_size // at.world_size
        profile = profile_of(at.profile or self.profile, self.bytes_scale)
        strategy = strategy_of(at.strategy)
        try:
            step = simulate(profile, self.hardware, strategy, at.world_size, own)
        except ValueError as error:
            raise Missing(str(error)) from None
        return step.step_s, step.payload_bytes


# Settings take longer to read than a step to simulate.
@cache
def profile_of(name: str, bytes_scale: float = 1.0) -> Profile:
    """A file of conf/profile. ConfigError: there is none."""
    return Profile.parse(read_file("profile", name)).scaled(bytes_scale)


@cache
def strategy_of(name: str) -> Strategy:
    """As `strategy=name` composes it. ConfigError: there is none; ValueError: it has no costs."""
    return Strategy.of(load([f"strategy={name}"]))
