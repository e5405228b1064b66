"""Observers of buckets. Drift: does an exchange deliver, in time, what ranks give it? And noise."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lab.distributed.comm import Collective, Comm
from lab.distributed.worker import HostCopy, Worker
from lab.exchange.base import Exchange
from lab.exchange.bucket import GradBucket
from lab.exchange.memory import fill_rows
from lab.exchange.scatter import ScatterLayout

# Of what was due in a window. Error feedback leaves rounding (1e-4 at most), and a codec without it
# that is meant to be used, as int8 or bf16, less than 5 %; a wrong scale, a residual that is lost
# and rows in the wrong place exceed 25 %.
LIMIT = 0.1
# Levels so coarse that rounding alone is off by tens of percent (int4 without error feedback) are
# judged by gain and cosine: rounding leaves both near 1, a wrong scale shows in the gain, values in
# a wrong place in the cosine.
LEAST_COSINE = 0.9
WEIGHTS, GRADIENTS = "weights", "gradients"


class Drift:
    """Compares what an exchange delivers with what was due, over windows of one bucket each.

    With true gradients g and residuals r of the ranks, in a window of k exchanges

        due = mean over ranks of (r before + sum of g - r after),  delivered = sum of the results

    are equal up to rounding, whatever the codec sends in a single step (Seide et al. 2014, section
    3). The relative error is |delivered - due| / |due|. Costs: docs/exchanges/choosing.md.

    Args: every: exchanges of a window, k.
    """

    def __init__(self, exchange: Exchange, comm: Comm, worker: Worker, every: int) -> None:
        self.exchange, self.comm, self.worker, self.every = exchange, comm, worker, every
        self._findings = DriftFindings(
            f"exchange={type(exchange).__name__}", comm, f"in the {every} exchanges up to step"
        )
        self.restart()

    def restart(self) -> None:
        """Forget the window under way: buckets are planned anew."""
        self._names: dict[str, None] = {}  # of buckets, in the order in which they were seen
        self._begin("")

    def _begin(self, name: str) -> None:
        """Begin a window of the bucket `name`; of the first that comes if it is empty."""
        self._name, self._count, self._step = name, 0, 0
        self._due = self._delivered = torch.empty(0)
        self._spans: list[tuple[str, int, int]] = []
        self._left_out: set[str] = set()

    def before(self, bucket: GradBucket) -> None:
        """Add a bucket that is about to be averaged to what is due."""
        name = str(bucket)
        self._names.setdefault(name)
        self._name = self._name or name
        if name != self._name:
            return
        if not self._count:
            self._due, self._delivered = self._residual(bucket), torch.zeros_like(bucket.flat)
        self._due.add_(bucket.flat, alpha=self.comm.size if bucket.divided else 1)

    def after(self, bucket: GradBucket) -> None:
        """Add a bucket that holds the mean to what is delivered."""
        if str(bucket) != self._name:
            return
        self._delivered += bucket.flat
        self._count += 1
        self._step = bucket.step
        if self._count == self.every:
            self._due -= self._residual(bucket)
            self._spans = list(bucket.spans())

    def leave_out(self, names: Iterable[str]) -> None:
        """Leave parameters out of the window under way, before `end_step`; alike on all ranks.

        No rank reached them in this step, so what they were delivered is taken away again, and
        what the exchange keeps of them is put back.
        """
        self._left_out.update(names)

    def end_step(self) -> None:
        """Compare, if a window is full; all ranks call this once a step's exchanges are done."""
        self._findings.read_arrived()
        if self._count < self.every:
            return
        self.worker.submit(f"drift of bucket {self._name}", self._compare)
        self.worker.wait()
        names = [*self._names]
        self._begin(names[(names.index(self._name) + 1) % len(names)])

    def results(self) -> list[dict[str, Any]]:
        return self._findings.all()

    def _residual(self, bucket: GradBucket) -> Tensor:
        kept = GradBucket(bucket.shapes, torch.zeros_like(bucket.flat))
        self.exchange.add_residual(kept, self.comm)
        return kept.flat

    def _compare(self) -> Iterator[Collective]:
        yield self.comm.iall_reduce(self._due)
        due, delivered = self._due.div_(self.comm.size), self._delivered
        for name, start, end in self._spans:
            if name in self._left_out:
                due[start:end] = delivered[start:end] = 0
        self._findings.add(f"bucket {self._name}", self._step, products(due, delivered))


class DriftFindings:
    """Comparisons of one run, read as they arrive, and the first alarm in words.

    Args:
        setting: that chose what is observed, for the message.
        window: what is compared, up to the number of a step, for the message.
        coarse: judge by gain and cosine, not by the error.
    """

    def __init__(self, setting: str, comm: Comm, window: str, coarse: bool = False) -> None:
        self._setting, self._comm, self._window, self._coarse = setting, comm, window, coarse
        # What is compared, in which step; relative error, cosine, and gain: the factor of what was
        # due that was delivered.
        self._coming: deque[tuple[str, int, HostCopy]] = deque()
        self._read: list[dict[str, Any]] = []

    def add(self, part: str, step: int, sums: Tensor) -> None:
        """Add a result of `products`, perhaps summed over ranks. The host does not wait."""
        due, delivered, both, gap = sums.unbind()
        least = torch.finfo(sums.dtype).tiny
        cosine = both / torch.clamp((due * delivered).sqrt(), min=least)
        error = (gap / torch.clamp(due, min=least)).sqrt()
        values = torch.stack([error, cosine, both / torch.clamp(due, min=least)])
        self._coming.append((part, step, HostCopy(values)))

    def read_arrived(self) -> None:
        """Read what has arrived, and warn of the first alarm on rank 0."""
        while self._coming and self._coming[0][2].has_arrived():
            part, step, values = self._coming.popleft()
            error, cosine, gain = (float(value) for value in values.read())
            # Never of NaN: gradients that are not finite end the run.
            wrong, expected = error > LIMIT, f"the limit is {LIMIT:.0%}"
            if self._coarse:
                wrong = abs(gain - 1) > LIMIT or cosine < LEAST_COSINE
                expected = f"their scale is {gain:.2f} and should be within {LIMIT:.0%} of 1"
            is_first = not any(earlier["alarm"] for earlier in self._read)
            if wrong and is_first and self._comm.rank == 0:
                text = (
                    f"{self._setting}: drift in {part}: the values delivered {self._window} {step} "
                    f"differ from the exact ones by {error:.1%} (cosine {cosine:.3f}); {expected}"
                )
                warnings.warn_explicit(text, UserWarning, __name__, 0)  # shows no line of source
            where = {"bucket": part.removeprefix("bucket "), "step": step}
            self._read.append({**where, "error": error, "cosine": cosine, "alarm": wrong})

    def all(self) -> list[dict[str, Any]]:
        """Return what each window found: its bucket, last step, error, cosine, and alarm or not."""
        for _, _, values in self._coming:
            values.read()
        self.read_arrived()
        return self._read


def products(due: Tensor, delivered: Tensor) -> Tensor:
    """Return due², delivered², their product and (delivered - due)², summed over values: [4].

    `delivered` is overwritten.
    """
    sums = [due.square().sum(), delivered.square().sum(), due.dot(delivered)]
    return torch.stack([*sums, delivered.sub_(due).square().sum()])


class FsdpDrift:
    """Compares weights and gradients that the lab moved for a unit with exact ones.

    Units and parts take turns, a window of k steps each. In its last step the weights of a unit are
    gathered exactly as well. Gradients are compared as by Drift: one exact reduce-scatter of
    residual before + gradients - residual after is due where the sum of all reduce-scatters was
    delivered. Sums of squares are added over the ranks, so a rank that is wrong alone shows. It
    costs memory of the unit's whole gradients.

    Args:
        comm: of all ranks.
        every: steps of a window, k.
        units: names of the units. parts: WEIGHTS, GRADIENTS, or both: what the lab moves.
    """

    def __init__(
        self, exchange: Exchange, comm: Comm, every: int, units: Sequence[str], parts: Sequence[str]
    ) -> None:
        self._exchange, self._comm, self._every = exchange, comm, every
        self._turns = [(part, unit) for unit in units for part in parts]
        name, window = f"exchange={type(exchange).__name__}", f"in the {every} exchanges up to step"
        self._of_gradients = DriftFindings(
            name, comm, window, coarse=not (exchange.exact or exchange.keeps_residuals)
        )
        self._of_weights = DriftFindings("sync.all_gather=int8", comm, "in step")
        self._due: Tensor | None = None
        self._delivered = torch.empty(0)
        self._done = False
        self.begin_step(0)

    def begin_step(self, step: int) -> None:
        self._step, self._done = step, False

    def compares_weights(self, unit: str) -> bool:
        return self._is_turn(WEIGHTS, unit) and self._is_last and not self._done

    def gathered(self, unit: str, own: Tensor, whole: Tensor, comm: Comm) -> None:
        """Compare gathered weights [N * n] with those of an exact gather of all ranks' `own`."""
        due = torch.empty_like(whole)
        comm.all_gather(due, own)
        self._compare(self._of_weights, f"weights of unit {unit}", due, whole.clone())
        self._done = True

    def giving(self, unit: str, gradients: Tensor, layout: ScatterLayout) -> None:
        """Add gradients [N, n] that are about to be scattered to what is due."""
        if not self._is_turn(GRADIENTS, unit):
            return
        if self._step % self._every == 0:
            self._due = self._residual(gradients, layout)
            self._delivered = torch.zeros_like(gradients[0])
        if self._due is not None:  # it is, where a run resumes within a window
            self._due += gradients

    def given(self, unit: str, total: Tensor, layout: ScatterLayout, comm: Comm) -> None:
        """Add this rank's part of a sum [n] to what is delivered; compare when a window is full."""
        if not self._is_turn(GRADIENTS, unit) or self._due is None:
            return
        self._delivered += total
        if not self._is_last:
            return
        self._due -= self._residual(self._due, layout)
        due = torch.empty_like(total)
        comm.reduce_scatter(due, self._due)
        self._compare(self._of_gradients, f"gradients of unit {unit}", due, self._delivered)
        self._due = None

    def end_step(self) -> None:
        self._of_weights.read_arrived()
        self._of_gradients.read_arrived()

    def results(self) -> list[dict[str, Any]]:
        found = [*self._of_weights.all(), *self._of_gradients.all()]
        return sorted(found, key=lambda window: window["step"])

    @property
    def _is_last(self) -> bool:
        return self._step % self._every == self._every - 1

    def _is_turn(self, part: str, unit: str) -> bool:
        return self._turns[self._step // self._every % len(self._turns)] == (part, unit)

    def _compare(self, findings: DriftFindings, part: str, due: Tensor, delivered: Tensor) -> None:
        sums = products(due, delivered)
        self._comm.all_reduce(sums)
        findings.add(part, self._step, sums)

    def _residual(self, gradients: Tensor, layout: ScatterLayout) -> Tensor:
        copy = torch.zeros_like(gradients)
        kept = self._exchange.state_dict().get("residual", {})
        for name, at in layout.columns.items():
            if name in kept:
                view = copy[:, at.start : at.stop].view(len(copy), -1, at.inner)
                fill_rows(view, kept[name])
        return copy


class GradientNoise:
    """Collects squared norms: of this rank's gradient, and of the mean over ranks.

    Attributes:
        local, mean: one 0-dim tensor for each step, on the gradients' device.
    """

    def __init__(self) -> None:
        self.local: list[Tensor] = []
        self.mean: list[Tensor] = []
        self._local: list[Tensor] = []  # by bucket of this step
        self._mean: list[Tensor] = []

    def before(self, bucket: GradBucket, size: int) -> None:
        """Add a bucket that is about to be averaged over `size` ranks."""
        factor = size if bucket.divided else 1
        self._local.append(factor**2 * bucket.flat.double().square().sum())

    def after(self, bucket: GradBucket) -> None:
        self._mean.append(bucket.flat.double().square().sum())

    def end_step(self) -> None:
        for sums, of_buckets in ((self.local, self._local), (self.mean, self._mean)):
            sums.append(torch.stack(of_buckets).sum())
            of_buckets.clear()
