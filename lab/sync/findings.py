"""Comparisons of what exchanges delivered with what was due, and the alarm in words."""

from __future__ import annotations

import warnings
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lab.distributed.comm import Comm

# Of what was due in a window. Error feedback leaves rounding (1e-4 at most), and a codec without it
# that is meant to be used, as int8 or bf16, less than 5 %; a wrong scale, a residual that is lost
# and rows in the wrong place exceed 25 %.
LIMIT = 0.1
# Levels so coarse that rounding alone is off by tens of percent (int4 without error feedback) are
# judged by gain and cosine: rounding leaves both near 1, a wrong scale shows in the gain, values in
# a wrong place in the cosine.
LEAST_COSINE = 0.9


@dataclass
class Found:
    """The result of a comparison, on its way to the host.

    Attributes:
        values: relative error, cosine, and gain: the factor of what was due that was delivered;
            float32 [3].
        ready: the event after which the host may read them; None: at once.
    """

    part: str
    step: int
    values: Tensor
    ready: torch.cuda.Event | torch.Event | None


class Findings:
    """Comparisons of one run, read as they arrive, and the first alarm in words.

    Args:
        setting: that chose what is observed, for the message.
        window: what is compared, up to the number of a step, for the message.
        coarse: judge by gain and cosine, not by the error.
    """

    def __init__(self, setting: str, comm: Comm, window: str, coarse: bool = False) -> None:
        self._setting, self._comm, self._window, self._coarse = setting, comm, window, coarse
        self._coming: deque[Found] = deque()
        self._read: list[dict[str, Any]] = []

    def compare(self, part: str, step: int, due: Tensor, delivered: Tensor) -> None:
        """Compare flat tensors; both may be overwritten. The host does not wait."""
        self.add(part, step, products(due, delivered))

    def add(self, part: str, step: int, sums: Tensor) -> None:
        """Add a result of `products`, perhaps summed over ranks."""
        due, delivered, both, gap = sums.unbind()
        least = torch.finfo(sums.dtype).tiny
        cosine = both / torch.clamp((due * delivered).sqrt(), min=least)
        error = (gap / torch.clamp(due, min=least)).sqrt()
        values = torch.stack([error, cosine, both / torch.clamp(due, min=least)])
        on_gpu = sums.device.type == "cuda"
        values = values.to("cpu", non_blocking=True)
        ready = torch.cuda.current_stream(sums.device).record_event() if on_gpu else None
        self._coming.append(Found(part, step, values, ready))

    def read_arrived(self) -> None:
        """Read what has arrived, and warn of the first alarm."""
        while self._coming and ((ready := self._coming[0].ready) is None or ready.query()):
            found = self._coming.popleft()
            error, cosine, gain = (float(value) for value in found.values)
            # Never of NaN: gradients that are not finite end the run.
            wrong = error > LIMIT
            if self._coarse:
                wrong = abs(gain - 1) > LIMIT or cosine < LEAST_COSINE
            if wrong and not any(earlier["alarm"] for earlier in self._read):
                self._warn(found, error, cosine, gain)
            part = found.part.removeprefix("bucket ")
            where = {"bucket": part, "step": found.step}
            self._read.append({**where, "error": error, "cosine": cosine, "alarm": wrong})

    def all(self) -> list[dict[str, Any]]:
        """Return what each window found: its bucket, last step, error, cosine, and alarm or not."""
        for found in self._coming:
            if found.ready is not None:
                found.ready.synchronize()
        self.read_arrived()
        return self._read

    def _warn(self, found: Found, error: float, cosine: float, gain: float) -> None:
        if self._comm.rank == 0:
            expected = f"expected is less than {LIMIT:.0%}"
            if self._coarse:
                expected = f"it is {gain:.2f} times what was due; expected is 1 within {LIMIT:.0%}"
            text = (
                f"{self._setting}: drift in {found.part}: what it delivered {self._window} "
                f"{found.step} is off by {error:.1%} of what was due (cosine {cosine:.3f}); "
                f"{expected}"
            )
            warnings.warn_explicit(text, UserWarning, __name__, 0)  # shows no line of source


def products(due: Tensor, delivered: Tensor) -> Tensor:
    """Return due², delivered², their product and (delivered - due)², summed over values: [4].

    `delivered` is overwritten.
    """
    sums = [due.square().sum(), delivered.square().sum(), due.dot(delivered)]
    return torch.stack([*sums, delivered.sub_(due).square().sum()])
