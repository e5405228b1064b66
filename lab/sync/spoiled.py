"""Undo or report exchanges of gradients that were not finite, in a loop that the lab does not own.

The lab's own trainer does both by itself (lab.training.trainer).
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from lab.exchange.base import Exchange


class Scaler(Protocol):
    """The part of torch.amp.GradScaler that is used."""

    def is_enabled(self) -> bool: ...
    def get_scale(self) -> float: ...


class SpoiledState:
    """Protection of an exchange's residuals from gradients that are not finite.

    With an enabled scaler such gradients are expected: the residuals are put back to what they were
    before the step, which the scaler will skip on every rank, and the host waits to know. Without
    one they are an error, found one step late, so that no host waits.

    Args:
        scaler: scales the loss; None: nothing does.
    """

    def __init__(self, exchange: Exchange, scaler: Scaler | None) -> None:
        self._exchange = exchange
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._before: dict[str, Any] = {}
        self._last: tuple[Tensor, torch.cuda.Event | torch.Event | None] | None = None

    def begin_step(self) -> float:
        """Return the loss scale of the step that begins: residuals are kept without it.

        Raises:
            FloatingPointError: the last step was not finite, and nothing has put residuals back.
        """
        self._check_last()
        if self._scaler is None or self._exchange.exact:
            return 1.0
        self._before = self._exchange.snapshot()
        return self._scaler.get_scale()

    def end_step(self, gradients: list[Tensor], finite: Tensor | None) -> None:
        """Look at the exchanged `gradients`; where a step must be undone, all become NaN.

        Args:
            finite: bool [], the exchange's finding; None: it did not check.
        """
        if not self._exchange.state_dict():
            return
        if self._scaler is None:
            self._note(finite)
            return
        norms: list[Tensor] = list(torch._foreach_norm(gradients))  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
        found = torch.stack(norms).isfinite().all()
        if not bool(found if finite is None else found & finite):
            self._exchange.load_state_dict(self._before)
            torch._foreach_mul_(gradients, torch.nan)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]

    def _note(self, finite: Tensor | None) -> None:
        if finite is None:
            return
        on_gpu = finite.device.type == "cuda"
        copy = finite.to("cpu", non_blocking=True)
        ready = torch.cuda.current_stream(finite.device).record_event() if on_gpu else None
        self._last = copy, ready

    def _check_last(self) -> None:
        if self._last is None:
            return
        (finite, ready), self._last = self._last, None
        if ready is not None:
            ready.synchronize()
        if not bool(finite):
            name = type(self._exchange).__name__
            raise FloatingPointError(
                f"exchange={name}: gradients of the last step were not finite, and spoiled its "
                "residuals; with a GradScaler, pass scaler=..., otherwise try a smaller rate"
            )
