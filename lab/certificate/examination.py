"""What all ranks saw of the first exchanges, judged; and the certificate that follows."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lab.certificate import report
from lab.certificate.diagnosis import Fault, diagnose, named
from lab.certificate.report import CertificateError, failed
from lab.certificate.sketch import HEAD
from lab.certificate.traffic import (
    OF_A_MESSAGE,
    TOLERANCE,
    Ledger,
    Odometer,
    Shapes,
    formula_bytes,
    moved,
)
from lab.certificate.verdict import Verdict, bounds, judge, unequal_at_start
from lab.certificate.watch import Seen
from lab.record.certificate import Certificate

TF32_EPS = 2.0**-10
QUIET_S, QUIET_BYTES = 0.05, 4096  # in such a pause, more bytes than these are others'
PROPERTY = {
    Fault.SUMMED: "averaged once",
    Fault.DIVIDED: "averaged once",
    Fault.SCALED: "averaged once",
    Fault.UNKNOWN: "averaged once",
    Fault.OWN: "exchanged",
    Fault.LEFT_OUT: "complete",
    Fault.GROUP: "right group",
    Fault.STALE: "fresh",
}


@dataclass(frozen=True)
class About:
    """What is known of an exchange before it begins.

    Attributes:
        gather: returns every rank's tensor, of one shape: [...] -> [N, ...] in host memory.
        size: ranks that should take part. num_launched: ranks that a launcher started.
        backend: library that carries the exchange.
        name: of the exchange, for messages.
        error_bound: see Exchange.error_bound.
        settings: of the exchange, which its formula reads; None: unknown.
        counts_itself: the exchange's bytes are counted as they are sent, not as a library says.
        promise: what ranks are left with, in the certificate's words.
    """

    gather: Callable[[Tensor], Tensor]
    size: int
    num_launched: int
    backend: str
    name: str
    error_bound: Callable[[float, int], float]
    settings: Mapping[str, Any] | None = None
    counts_itself: bool = True
    promise: str = "gradients averaged once"


@dataclass
class Examination:
    """The exchanges that were looked at so far. All ranks add the same, and find the same.

    Args:
        names: of the trainable parameters. names_at_start: of those and the buffers.
        parameters: the same parameters.
        late_names: returns the names of those that have become trainable since.
    """

    about: About
    names: list[str]
    names_at_start: list[str]
    parameters: list[nn.Parameter]
    late_names: Callable[[], list[str]]
    num_exchanges: int = 0
    verdict: Verdict | None = None
    bound: float = 0.0
    _last: Tensor | None = None
    ledger: Ledger = field(init=False)

    def __post_init__(self) -> None:
        self.ledger = Ledger(sum(p.numel() for p in self.parameters), [])

    def add(
        self,
        mine: Seen,
        sent: Tensor,
        buckets: Sequence[Shapes],
        judged: Sequence[int] | None = None,
    ) -> bool:
        """Judge an exchange. A collective call.

        Args:
            sent: a result of Odometer.stop. buckets: shapes by bucket; empty: unknown.
            judged: ranks that must hold the mean; None: all.

        Returns:
            False if it was left out, as a gradient was not finite.

        Raises:
            CertificateError: names what is wrong.
        """
        seen = mine.of_all(self.about.gather)
        traffic = self.about.gather(sent)
        if not seen.is_finite():
            return False
        self.num_exchanges += 1
        self._check_start(seen.start)
        if not seen.reached.any():
            self.fail(
                "exchanged",
                "hook ignored: backward reached no parameter of this model; does a copy of it train?",
            )
        if late := seen.late.any(dim=0).nonzero().flatten().tolist():
            self.fail(
                "complete",
                f"left out: {self.late_names()[late[0]]} has a gradient, but became trainable after its exchange was set up",
            )
        self._check_gradients(seen, range(self.about.size) if judged is None else judged)
        self._check_bytes(traffic, buckets)
        return True

    def check_weights(self, weights: Tensor) -> None:
        """Refuse weights that differ after they were exchanged: images [P, K]. A collective call."""
        for index, ranks in unequal_at_start(self.about.gather(weights.cpu())).items():
            self.fail(
                "exchanged",
                f"not exchanged: {self.names[index]} on ranks {named(ranks)} differs from rank 0's after weights were sent",
            )

    def fail(self, property: str, text: str) -> None:
        """End the examination.

        Raises:
            CertificateError: always.
        """
        raise CertificateError(failed(self, property, text))

    def certificate(self) -> Certificate:
        """Return what was proven so far. A collective call.

        Raises:
            CertificateError: more bytes crossed an interface than were said to, and nobody else
                sends there.
        """
        ratio, where = self.ledger.excess() if self.ledger.entries else (None, "")
        if ratio is not None and ratio > 1 + TOLERANCE and self._is_quiet():
            self.fail(
                "bytes",
                f"bytes: {where} counted {ratio:.2f}x what the exchange handed to the network in "
                f"each of {self.num_exchanges} exchanges, and nothing in between",
            )
        return report.certificate(self)

    def _is_quiet(self) -> bool:
        """Return whether nothing crosses the interfaces while no rank sends."""
        odometer = Odometer()
        self.about.gather(torch.zeros(1))  # no rank is in an exchange any more
        odometer.start(0)
        time.sleep(QUIET_S)
        counted = moved(self.about.gather(odometer.stop(0)), self.about.backend).counted
        return counted is not None and counted < QUIET_BYTES

    def _check_start(self, start: Tensor) -> None:
        for index, ranks in unequal_at_start(start).items():
            text = f"different initial weights: {self.names_at_start[index]} on ranks {named(ranks)} was not equal to rank 0's in the first step"
            self.fail("equal start", text)

    def _check_gradients(self, seen: Seen, judged: Sequence[int]) -> None:
        head_only = seen.own.shape[-2] == 1 and self.num_exchanges > 1
        sizes = [min(p.numel(), HEAD) if head_only else p.numel() for p in self.parameters]
        self.bound = self.about.error_bound(float(seen.largest.max()), self.about.size)
        eps = torch.tensor([_eps(p) for p in self.parameters], dtype=torch.float64)
        first, bound = seen.row(0), bounds(self.bound, sizes)
        verdict = judge(first, bound, eps, judged)
        if verdict.wrong.any():
            found = diagnose(first, verdict, self._last, self.bound > 0)
            few = [self.names[index] for index in found.parameters]
            which = few[0] if len(few) == 1 else f"{few[0]} and {len(few) - 1} more"
            hold = "holds" if len(few) == 1 else "hold"
            text = (
                f"{found.fault.value}: {which} on ranks {named(found.ranks)} {hold} {found.text}, in exchange {self.num_exchanges}, where the mean of the ranks' own "
                "gradients should be, which were noted before the exchange"
            )
            self.fail(PROPERTY[found.fault], text)
        if self.verdict is None:  # the first one reads all values
            self.verdict = verdict
        self._last = seen.row(-1).sent.mean(dim=0)

    def _check_bytes(self, traffic: Tensor, buckets: Sequence[Shapes]) -> None:
        about = self.about
        self.ledger.entries.append(moved(traffic, about.backend))
        if not about.counts_itself:
            return
        padding = OF_A_MESSAGE * about.size * len(buckets) + 16 * len(self.names)
        formula = formula_bytes(about.settings, buckets, about.size)
        if fault := self.ledger.fault(formula, padding):
            self.fail("exchanged" if fault.startswith("hook") else "bytes", fault)


def _eps(parameter: nn.Parameter) -> float:
    """Return the relative spacing of a gradient's values, or of products that made it."""
    coarse = parameter.is_cuda and torch.backends.cuda.matmul.allow_tf32
    eps = torch.finfo(parameter.dtype).eps
    return max(eps, TF32_EPS) if coarse else eps
