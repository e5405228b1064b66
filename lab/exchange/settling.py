"""When a variance has settled, so that it may be frozen: without a wait of the host."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lab.exchange.direction import Moments, require_integer

SAMPLED = 16  # every 16th value is compared: the norms hardly differ, and nor does memory


class Settling:
    """Watches ‖v_t − v_{t−k}‖₁ / ‖v_t‖₁, of v corrected for its bias, every k steps.

    Tang et al. 2021 (section 7.1) freeze when the norm itself stops changing; the norm of the
    difference also sees values that change in opposite directions. All ranks have the same v, so
    all find the same. The sums travel to the host while the next step is queued, and are read in
    the step after it.

    Args:
        every: k.
        below: the variance has settled once the ratio is below it.
        least: steps before which it has not, whatever the ratio.

    Attributes:
        ratio: the last ratio read; None: there is none yet.

    Raises:
        ValueError: an argument out of range.
    """

    def __init__(self, every: int, below: float, least: int) -> None:
        require_integer("settle_every", every, 2)
        if not isinstance(below, int | float) or not 0 < below < 1:
            raise ValueError(f"exchange.settle_below={below}: must be a number above 0 and below 1")
        self.every, self.below, self.least = every, below, least
        self.ratio: float | None = None
        self.sample: Moments = {}  # float32 [values / SAMPLED] of v, k steps ago
        self._sums: Tensor | None = None  # float32 [2]: of differences, and of v
        self._coming: tuple[Tensor, torch.cuda.Event | torch.Event | None] | None = None

    def look(self, name: str, variance: Tensor, correction: float, updates: int) -> None:
        """Compare parameter `name` with what it was k steps ago, if it is time.

        Args:
            variance: float32 [values].
            correction: the sum of the weights in it.
            updates: steps so far.
        """
        if updates % self.every:
            return
        now = variance[::SAMPLED] / correction
        before = self.sample.get(name)
        self.sample[name] = now
        difference = now if before is None else now - before
        sums = torch.stack([difference.abs().sum(), now.sum()])
        self._sums = sums if self._sums is None else self._sums + sums

    def settled(self, updates: int) -> bool:
        """Return whether the variance has settled. Called once a step, before it.

        Args:
            updates: steps so far, the one that begins included.
        """
        if updates % self.every == 1 and self._sums is not None:
            self._coming = _to_host(self._sums)
        if updates % self.every != 2 % self.every or self._sums is None:
            return False
        sums, ready = self._coming or _to_host(self._sums)  # not coming: just resumed
        if ready is not None:
            ready.synchronize()
        self._sums = self._coming = None
        difference, total = sums.tolist()
        self.ratio = difference / total if total else 0.0
        return self.ratio < self.below and updates > self.least

    def state_dict(self) -> dict[str, Any]:
        sums = {} if self._sums is None else {"sums": self._sums}
        return {"settling": {**sums, **{f"sample.{n}": v for n, v in self.sample.items()}}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        kept = {name: value.clone() for name, value in state["settling"].items()}
        self._sums, self._coming = kept.pop("sums", None), None
        self.sample = {name.removeprefix("sample."): value for name, value in kept.items()}


def _to_host(sums: Tensor) -> tuple[Tensor, torch.cuda.Event | torch.Event | None]:
    on_gpu = sums.device.type == "cuda"
    copy = sums.to("cpu", non_blocking=True)
    return copy, torch.cuda.current_stream(sums.device).record_event() if on_gpu else None
