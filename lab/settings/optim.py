"""Settings of the group `optim` that need no torch to check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from lab.settings import checks
from lab.settings.errors import ConfigError

SCHEDULES = ("constant", "cosine", "linear", "step")
WITH_AN_END = ("cosine", "linear")
NOT_NEGATIVE = ("lr", "weight_decay")  # of any optimizer
OF_CHOICES = ("torch.optim.SGD", "torch.optim.AdamW")  # what the lab's choices name


@dataclass(frozen=True, kw_only=True)
class LearningRate:
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

    Raises: ConfigError: a value out of range, or one that the schedule does not use.
    """

    schedule: str = "cosine"
    warmup_steps: int = 20
    final_share: float = 0.0
    step_every: int | None = None
    step_factor: float = 0.1
    linear_scaling: bool = False
    base_batch_size: int = 128

    def __post_init__(self) -> None:
        checks.one_of("optim.schedule", self.schedule, SCHEDULES)
        checks.integer("optim.warmup_steps", self.warmup_steps, 0)
        checks.integer("optim.base_batch_size", self.base_batch_size, 1)
        checks.number("optim.final_share", self.final_share, at_least=0, at_most=1)
        checks.number("optim.step_factor", self.step_factor, at_least=0, at_most=1)
        checks.truth("optim.linear_scaling", self.linear_scaling)
        if self.final_share and self.schedule not in WITH_AN_END:
            raise ConfigError(
                f"optim.final_share={self.final_share}: needs optim.schedule=cosine or linear"
            )
        if self.schedule == "step":
            checks.integer("optim.step_every", self.step_every, 1)
        else:
            self._refuse_set("optim.schedule=step", "step_every", "step_factor")
        if not self.linear_scaling:
            self._refuse_set("optim.linear_scaling=true", "base_batch_size")

    def _refuse_set(self, needed: str, *names: str) -> None:
        """Refuse values other than the defaults, which would have no effect."""
        for name in names:
            if (value := getattr(self, name)) != getattr(LearningRate, name):
                raise ConfigError(f"optim.{name}={value}: needs {needed}")

    def peak(self, lr: float, batch_size: int) -> float:
        """Return the largest rate of a run with this global batch."""
        return lr * batch_size / self.base_batch_size if self.linear_scaling else lr


OF_SCHEDULE = tuple(field.name for field in fields(LearningRate))


def schedule_of(optim: Mapping[str, Any]) -> LearningRate:
    """Check the settings of the group `optim`, but those that only its own signature tells.

    Args: optim: as composed, without references.

    Raises: ConfigError: a value has another type, is out of range, or is one that is not used.
    """
    for name in NOT_NEGATIVE:
        if name in optim:
            checks.number(f"optim.{name}", optim[name], at_least=0)
    checks.truth("optim.decay_vectors", optim.get("decay_vectors", True))
    if optim["_target_"] in OF_CHOICES:
        _check_own(optim)
    return LearningRate(**{key: optim[key] for key in OF_SCHEDULE if key in optim})


def _check_own(optim: Mapping[str, Any]) -> None:
    """Check what else the optimizers of the lab's choices have."""
    for name in ("momentum", "eps"):
        checks.number(f"optim.{name}", optim.get(name, 0), at_least=0)
    if checks.truth("optim.nesterov", optim.get("nesterov", False)) and not optim.get("momentum"):
        raise ConfigError("optim.nesterov=true: needs optim.momentum above 0")
    betas = optim.get("betas", [0, 0])
    if not isinstance(betas, list) or len(betas) != 2:
        raise ConfigError(f"optim.betas={betas}: must be a list of 2 numbers")
    for beta in betas:
        checks.number("optim.betas", beta, at_least=0, below=1)
