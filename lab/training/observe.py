"""Observers of each exchange, as a run's settings ask for them: noise of gradients, and drift."""

from __future__ import annotations

from lab.settings.config import ConfigError, Settings
from lab.sync.base import Sync
from lab.sync.gradsync import GradientNoise, GradSync


def observe(sync: Sync, settings: Settings) -> None:
    """Attach what the settings ask to be observed of each exchange."""
    if settings.measure == "noise":
        _observe_noise(sync)
    if settings.drift_every is not None:
        observe_drift(sync, settings.drift_every, settings.precision)


def _observe_noise(sync: Sync) -> None:
    """Collect the norms of gradients before and after their exchange.

    Raises:
        ConfigError: there is one rank, or ranks do not exchange gradients as they are.
    """
    if sync.comm.size == 1:
        raise ConfigError("measure=noise: compares the ranks' gradients: needs two ranks or more")
    if type(sync) is not GradSync or not sync.exchange.exact:
        raise ConfigError(
            "measure=noise: needs a strategy that averages gradients exactly in every step, such "
            "as allreduce"
        )
    sync.noise = GradientNoise()


def observe_drift(sync: Sync, every: int, precision: str) -> None:
    """Compare what the exchange delivers with what was due.

    Raises:
        ConfigError: no exchange of the lab leaves a mean on all ranks, or steps may be undone.
    """
    if precision == "fp16":
        raise ConfigError(
            f"drift_every={every}: precision=fp16 puts residuals back when it skips a step; "
            "allowed are fp32, bf16"
        )
    try:
        sync.observe_drift(every)
    except ValueError as error:
        raise ConfigError(f"drift_every={every}: {error}") from None
