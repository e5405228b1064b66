"""Sources of a model's times: a profile, or an estimate that depends on the hardware."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from omegaconf import DictConfig

from lab.measure.peaks import arithmetic_of
from lab.model.profile import Profile
from lab.model.work import Work
from lab.settings.names import class_name
from lab.simulate.devices import of_this_machine
from lab.simulate.estimate import ESTIMATE, estimated
from lab.simulate.hardware import Hardware


@dataclass(frozen=True)
class Measured:
    """A profile, which holds on any hardware that it is predicted on."""

    basis: ClassVar[str] = "profile"
    profile: Profile

    def on(self, hardware: Hardware) -> Profile:
        """Return the profile."""
        return self.profile


@dataclass(frozen=True)
class Estimate:
    """Counted work, whose times follow from the hardware's device.

    Attributes:
        precision, batches: see `estimated`.
        name: of its profiles.
    """

    basis: ClassVar[str] = ESTIMATE
    work: Work
    precision: str
    batches: tuple[int, int]
    name: str

    def on(self, hardware: Hardware) -> Profile:
        """Return the profile that the device of this hardware would have.

        Raises:
            ValueError: the hardware names no device, or not its peak.
        """
        if hardware.device is None:
            raise ValueError(
                f"hardware={hardware.name}: has no device to estimate a model on; give "
                "hardware.device.name (lab/measure/peaks.py), or the model's measured profile="
            )
        device = of_this_machine(hardware.device)
        return estimated(self.work, device, self.precision, self.batches, self.name)


Source = Measured | Estimate


def source_of(config: DictConfig, profile: Profile | None, batches: tuple[int, int]) -> Source:
    """Return the source of the times of a run: its profile, or else an estimate of its model.

    Args:
        config: settings of the run; its model is counted at most once in a process.
        profile: measured; None: the model is estimated.
        batches: samples per rank, the smallest and the largest of interest.

    Raises:
        ConfigError: the model cannot be built or counted.
    """
    if profile:
        return Measured(profile)
    from lab.simulate.counting import work_of  # Imports torch.

    work = work_of(config)
    model = class_name(config.model["_target_"])
    name = f"{model}, {work.flops_per_sample / 1e9:.4g} GFLOP per sample (estimate)"
    return Estimate(work, arithmetic_of(config.precision, config.tf32), batches, name)
