"""Memory: what lossy codecs leave out of gradients and of their sums, kept for later steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lab.distributed.worker import record_stream
from lab.exchange.base import ResidualPart
from lab.exchange.bucket import GradBucket
from lab.settings import checks

LEGACY = "stripe_residual"  # of checkpoints before residuals of sums were kept by place
Range = tuple[int, int]  # first and end, of values of a bucket
OwnedRange = tuple[int, int, int]  # first value, its place in Bound.owned, and their number


class Owned(NamedTuple):
    """Residuals of a parameter's values from `start` on, whose sum this rank encodes."""

    start: int
    values: Tensor


@dataclass(frozen=True)
class Columns:
    """A parameter's columns in gradients [N, n]: `inner` values for each of its own rows."""

    start: int
    stop: int
    inner: int


@dataclass(eq=False)
class Bound:
    """Residuals of one bucket: what `Memory.bind` returns.

    Attributes:
        own: of its gradients, laid out like `flat`; None: none are kept.
        owned: of the sums that this rank encodes, in their order; None: none are kept.
        current: they are still what is kept. They no longer are once they have been flushed, a
            state was loaded, or a parameter of theirs was bound with others.
    """

    own: Tensor | None
    owned: Tensor | None = None
    current: bool = True


class Memory:
    """Error feedback of one rank, by parameter name.

    A codec sends a part of gradient + residual and leaves the rest as the new residual. Where a
    path encodes sums a second time, their owner keeps what that leaves out. So, summed over the
    ranks, delivered + residuals = true gradients at any time (Seide et al. 2014, section 3;
    Karimireddy et al. 2019, Algorithm 2). A gradient that is not finite spoils residuals too: the
    run fails, or the trainer restores the state.

    Residuals lie in one tensor for each bucket, in the order of its values, so that a kernel takes
    them all at once. Where a sum has another owner than before, since buckets or the number of
    ranks have changed, its residual joins that of the earlier owner's own gradients.

    Args:
        keeps: False drops what codecs leave out, to show what that costs.

    Attributes:
        of_sums: it keeps what is left out of sums, too.
    """

    of_sums = False

    def __init__(self, keeps: bool = True) -> None:
        self.keeps = checks.truth("exchange.error_feedback", keeps)
        self._own: dict[str, Tensor] = {}  # [values] by parameter, views of a bucket's residuals
        self._owned: dict[str, Owned] = {}
        self._starts: dict[str, Tensor] = {}  # of _owned, as states hold them
        self._bound: dict[str, Bound] = {}  # by each of a bucket's parameters

    def bind(
        self,
        bucket: GradBucket,
        coded: Sequence[Range],
        owned: Sequence[OwnedRange] = (),
        num_owned: int = 0,
    ) -> Bound:
        """Return the residuals of a bucket, to be replaced in place.

        Args:
            coded: what a codec encodes, in order.
            owned: where sums that this rank encodes lie in the bucket, in order, among the
                `num_owned` of `Bound.owned`.
        """
        if not self.keeps:
            return Bound(None)
        flat = bucket.flat  # where it has no values, torch loads sympy for a `zeros_like`
        own, of_sums = flat.new_zeros(flat.shape), flat.new_zeros(num_owned)
        for name, start, stop in _coded_spans(bucket, coded):
            if name in self._own:
                own[start:stop] = record_stream(self._own[name]).view(-1)
            self._own[name] = own[start:stop]
        if self.of_sums:
            self._bind_sums(bucket, owned, of_sums)
        bound = Bound(own, of_sums)
        for name in bucket.shapes:
            if before := self._bound.get(name):
                before.current = False
            self._bound[name] = bound
        return bound

    def _bind_sums(self, bucket: GradBucket, owned: Sequence[OwnedRange], residual: Tensor) -> None:
        now_owned = {
            name: Owned(start, residual[place : place + count])
            for name, start, place, count in _by_parameter(bucket, owned)
        }
        for name in bucket.shapes:
            before, now = self._owned.pop(name, None), now_owned.get(name)
            if before:
                first, values = before[0], record_stream(before.values)
                if now and (first, len(values)) == (now.start, len(now.values)):
                    now.values.copy_(values)
                else:
                    self._own[name][first:][: len(values)] += values
            if now:
                self._owned[name], self._starts[name] = now, torch.tensor(now.start)

    def bind_columns(self, gradients: Tensor, columns: Mapping[str, Columns]) -> Tensor | None:
        """Return the residuals of gradients that are laid out by the rank they go to, [N, n].

        They are kept as [N, rows, inner] by parameter; those of another number of ranks are laid
        out anew. None: nothing is kept.
        """
        if not self.keeps:
            return None
        bound = self._bound.get(first := next(iter(columns), ""))
        if bound and bound.own is not None and bound.own.shape == gradients.shape:
            return bound.own
        residual = torch.zeros_like(gradients)
        self._bound[first] = Bound(residual)
        for name, at in columns.items():
            own = residual[:, at.start : at.stop].unflatten(1, (-1, at.inner))
            if name in self._own:
                fill_rows(own, record_stream(self._own[name]))
            self._own[name] = own
        return residual

    def add_to(self, bucket: GradBucket) -> None:
        """Add this rank's residuals to `bucket.flat`."""
        for name, start, stop in bucket.spans():
            if name in self._own:
                bucket.flat[start:stop] += record_stream(self._own[name]).view(-1)
            if name in self._owned:
                first, values = self._owned[name]
                bucket.flat[start + first :][: len(values)] += record_stream(values)

    def flush_to(self, bucket: GradBucket) -> None:
        """Add this rank's residuals to `bucket.flat`, and forget them."""
        self.add_to(bucket)
        for name in bucket.shapes:
            for kept in (self._own, self._owned, self._starts):
                kept.pop(name, None)
            if bound := self._bound.pop(name, None):
                bound.current = False

    def residuals(self) -> Iterator[ResidualPart]:
        """Yield residuals: a parameter, the place of the first value, and values [n]."""
        for name, values in self._own.items():
            yield name, 0, values.view(-1)
        for name, (start, values) in self._owned.items():
            yield name, start, values

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's residuals, by kind and parameter; {} if none are kept."""
        if not self.keeps:
            return {}
        state: dict[str, Any] = {"residual": dict(self._own)}
        if self.of_sums:
            state["owner"] = {name: owned.values for name, owned in self._owned.items()}
            state["owner_start"] = {name: self._starts[name] for name in self._owned}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the result of `state_dict` of the same rank.

        Raises:
            ValueError: an earlier version of the lab wrote it.
        """
        if LEGACY in state:
            raise ValueError(
                "state_dict: an earlier version of the lab wrote these residuals in another "
                "layout; start again, or continue from the weights alone"
            )
        self._own = {name: value.clone() for name, value in state.get("residual", {}).items()}
        self._starts = dict(state.get("owner_start", {}))
        self._owned = {
            name: Owned(int(self._starts[name]), values.clone())
            for name, values in state.get("owner", {}).items()
        }
        for bound in self._bound.values():
            bound.current = False
        self._bound = {}

    def shares(self, states: Sequence[Mapping[str, Any]], size: int) -> dict[str, Any]:
        """Return the state of each of `size` ranks, which share what others kept: its sum stays."""
        if not states[0]:
            return {}
        own = states[0]["residual"]
        total = {name: torch.zeros_like(v, dtype=torch.float64) for name, v in own.items()}
        for state in states:
            for name, values in state["residual"].items():
                total[name] += values
            for name, values in state.get("owner", {}).items():
                total[name][int(state["owner_start"][name]) :][: len(values)] += values
        shared = {name: (values / size).float() for name, values in total.items()}
        return {"residual": shared, **({"owner": {}, "owner_start": {}} if self.of_sums else {})}


def _by_parameter(
    bucket: GradBucket, owned: Sequence[OwnedRange]
) -> Iterator[tuple[str, int, int, int]]:
    """Yield each parameter's owned values: first one, place, number. They follow each other."""
    found: dict[str, tuple[int, int, int]] = {}
    for first, place, count in owned:
        for name, start, stop in bucket.spans():
            low, high = max(start, first), min(stop, first + count)
            if low < high:
                begin, at, number = found.get(name, (low - start, place + low - first, 0))
                assert begin + number == low - start, f"{name}: is owned in several places"
                found[name] = begin, at, number + high - low
    yield from ((name, *each) for name, each in found.items())


def _coded_spans(bucket: GradBucket, coded: Iterable[Range]) -> Iterator[tuple[str, int, int]]:
    """Yield the spans of parameters of which a codec encodes any value."""
    ranges = iter(coded)
    first, end = next(ranges, (math.inf, math.inf))
    for name, start, stop in bucket.spans():
        while end <= start:
            first, end = next(ranges, (math.inf, math.inf))
        if first < stop:
            yield name, start, stop


def fill_rows(view: Tensor, saved: Tensor) -> None:
    """Copy the rows of a parameter, [N, rows, inner], to where another N or none puts them."""
    laid_out = torch.zeros_like(view, memory_format=torch.contiguous_format).flatten(0, 1)
    rows = saved.flatten(0, 1)[: len(laid_out)]  # what is cut off is padding
    laid_out[: len(rows)] = rows
    view.copy_(laid_out.view_as(view))


def shares(kept: list[dict[str, Tensor]], size: int) -> dict[str, Tensor]:
    """Return an equal share for each of `size` ranks of what others kept, by parameter."""
    return {
        name: sum((tensors[name].double() for tensors in kept[1:]), kept[0][name].double())
        .div_(size)
        .float()
        for name in kept[0]
    }
