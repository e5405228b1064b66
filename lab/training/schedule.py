"""The learning rate over time: a function of the step alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lab.settings.errors import ConfigError

SCHEDULES = ("constant", "cosine", "linear", "step")
WITH_AN_END = ("cosine", "linear")


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A warm-up, and the course of the learning rate after it. Steps are the optimizer's.

    Attributes:
        schedule: "constant"; "cosine" (Loshchilov and Hutter 2017, equation 5, without restarts);
            "linear" (Devlin et al. 2019, appendix A.2); or "step", which multiplies the rate by
            `step_factor` every `step_every` steps, counted from the run's first (He et al. 2016,
            section 3.4).
        warmup_steps: steps of linear growth to the peak (Goyal et al. 2017, section 2.2).
        final_share: rate after the last step, as a share of the peak; of "cosine" and "linear".
        linear_scaling: multiply the peak by batch_size / base_batch_size (Goyal et al. 2017,
            section 2.1).
        base_batch_size: the global batch for which the peak was chosen.

    Raises:
        ConfigError: a value out of range, or one that the schedule does not use.
    """

    schedule: str = "cosine"
    warmup_steps: int = 20
    final_share: float = 0.0
    step_every: int | None = None
    step_factor: float = 0.1
    linear_scaling: bool = False
    base_batch_size: int = 128

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            allowed = ", ".join(SCHEDULES)
            raise ConfigError(f"optim.schedule={self.schedule}: allowed are {allowed}")
        _require_integer("warmup_steps", self.warmup_steps, 0)
        _require_integer("base_batch_size", self.base_batch_size, 1)
        _require_share("final_share", self.final_share)
        _require_share("step_factor", self.step_factor)
        if not isinstance(self.linear_scaling, bool):
            raise ConfigError(f"optim.linear_scaling={self.linear_scaling}: must be true or false")
        if self.final_share and self.schedule not in WITH_AN_END:
            raise ConfigError(
                f"optim.final_share={self.final_share}: needs optim.schedule=cosine or linear"
            )
        if self.schedule == "step":
            _require_integer("step_every", self.step_every, 1)
        elif self.step_every is not None:
            raise ConfigError(f"optim.step_every={self.step_every}: needs optim.schedule=step")

    def peak(self, lr: float, batch_size: int) -> float:
        """Return the largest rate of a run with this global batch."""
        return lr * batch_size / self.base_batch_size if self.linear_scaling else lr

    def rate(self, peak: float, step: int, total_steps: int) -> float:
        """Return the rate of step `step` of `total_steps`, counted from 0."""
        if step < self.warmup_steps:
            return peak * (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return peak
        if self.schedule == "step":
            assert self.step_every is not None
            return peak * self.step_factor ** (step // self.step_every)
        done = (step - self.warmup_steps) / max(1, total_steps - self.warmup_steps)
        left = (1 + math.cos(math.pi * done)) / 2 if self.schedule == "cosine" else 1 - done
        return peak * (self.final_share + (1 - self.final_share) * left)


def _require_integer(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        shown = "null" if value is None else value
        raise ConfigError(f"optim.{name}={shown}: must be an integer of at least {least}")


def _require_share(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ConfigError(f"optim.{name}={value}: must be a number from 0 to 1")
