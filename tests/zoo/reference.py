"""What a loop should do: one process, whose ranks meet where gradients are averaged."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.loops import DoesNotApply, Handle, Loop, Named, Run, gradients
from tests.zoo.models import RANDOM, Model

WAIT_S = 20.0
Average = Callable[[list[Tensor], int], Tensor]


@dataclass
class Result:
    """What a rank has at the end of a loop; a handle's things are at its place.

    Attributes:
        weights, buffers: by name.
        delivered: after each exchange.
        own: each rank's gradients before it; the reference's alone.
        extras: see Run.
        kept: the exchange's residuals: parameter, place of the first value, values.
        bounds: of the distance of each exchange's delivered values from the mean.
        error: what ended the loop.
    """

    weights: list[dict[str, Tensor]] = field(default_factory=list)
    buffers: list[dict[str, Tensor]] = field(default_factory=list)
    delivered: list[list[Named]] = field(default_factory=list)
    own: list[list[list[Named]]] = field(default_factory=list)
    extras: dict[str, Tensor] = field(default_factory=dict)
    kept: list[list[tuple[str, int, Tensor]]] = field(default_factory=list)
    bounds: list[float] = field(default_factory=list)
    error: Any = None

    def take(self, run: Run) -> None:
        """Take what a loop has left."""
        for handle in run.handles:
            named = handle.net.named_parameters()
            self.weights.append({n: p.detach().clone() for n, p in named})
            self.buffers.append({n: b.to_dense().clone() for n, b in handle.net.named_buffers()})
            self.delivered.append(handle.delivered)
        self.extras = run.extras


class Truth:
    """What a loop should do with a model on `size` ranks.

    Attributes:
        ranks: the results of all ranks with means of float64, in which also the model is if it
            can be.
    """

    def __init__(self, model: Model, loop: Loop, size: int) -> None:
        self._facts = model, loop, size
        self.ranks = _results(*self._facts, wide=model.wide, average=mean)

    @cached_property
    def rounded(self) -> list[Result]:
        """The same in the model's own dtype: the distance is what rounding alone does."""
        model, loop, _ = self._facts
        average = narrow_sum if loop.of_trainer and not model.wide else narrow_mean
        return _results(*self._facts, wide=False, average=average)


class Meeting:
    """Where the ranks' threads wait for each other."""

    def __init__(self, size: int) -> None:
        self.size, self._slots = size, [None] * size
        self.barrier = threading.Barrier(size, timeout=WAIT_S)

    def gather(self, rank: int, value: Any) -> list[Any]:
        """Return every rank's value."""
        self._slots[rank] = value
        self.barrier.wait()
        every = list(self._slots)
        self.barrier.wait()
        return every


class Exact(Handle):
    """A handle that averages without buckets or hooks.

    Args:
        average: of the gradients of those ranks that have one, over as many ranks.
    """

    def __init__(
        self, net: nn.Module, scaler: Any, rank: int, meeting: Meeting, average: Average
    ) -> None:
        super().__init__(net, scaler)
        self._average = average
        self._rank, self._meeting = rank, meeting
        self.own: list[list[Named]] = []
        self._last: Named = {}

    @property
    def factor(self) -> float:
        """The factor of the loss: some of the trainer's syncs divide it in place of gradients."""
        return 1 / self._meeting.size if self._average is narrow_sum else 1.0

    def exchange(self) -> None:
        """Average over the ranks that have a gradient; those without count as zeros."""
        every = self._meeting.gather(self._rank, gradients(self.net))
        scale = self.scale
        self.own.append(
            [{n: None if g is None else g / scale for n, g in one.items()} for one in every]
        )
        means: Named = {}
        for name, parameter in self.net.named_parameters():
            present = [one[name] for one in every if one[name] is not None]
            means[name] = None
            if present:  # in the layout in which autograd leaves it
                means[name] = torch.empty_like(parameter).copy_(self._average(present, len(every)))
        due, self._last = (self._last if self.late else means), means
        for name, parameter in self.net.named_parameters():
            parameter.grad = due.get(name)


class Alone(Run):
    """A rank of the reference. All have rank 0's initial weights."""

    def __init__(
        self, model: Model, rank: int, meeting: Meeting, wide: bool, average: Average | None = None
    ) -> None:
        super().__init__(model, rank, meeting.size)
        self._meeting, self._wide, self._average = meeting, wide, average or mean

    def make(self, number: int = 0) -> nn.Module:
        """Build a model, in float64 with the values of the one in float32."""
        self._meeting.gather(self.rank, None)
        rank, self.rank = self.rank, 0
        with RANDOM, default_dtype(torch.float32):
            net = super().make(number)
            if self._wide:
                with default_dtype(torch.float64):
                    narrow, net = net, super().make(number)
                for one, other in zip(_tensors(net), _tensors(narrow), strict=True):
                    _fill(one, other)
        self.rank = rank
        self._meeting.gather(self.rank, None)
        return net

    def enter(self, net: nn.Module, scaler: Any, place: int) -> Handle:
        """Make a handle. On entry all ranks get rank 0's buffers."""
        first = self._meeting.gather(self.rank, [buffer.clone() for buffer in net.buffers()])[0]
        for buffer, value in zip(net.buffers(), first, strict=True):
            _fill(buffer, value)
        handle = Exact(net, scaler, self.rank, self._meeting, self._average)
        if place < len(self.handles):
            before = self.handles[place]
            assert isinstance(before, Exact)
            handle.own = before.own
        return handle

    def batch(self, step: int, micro: int = 0) -> tuple[Any, ...]:
        batch = super().batch(step, micro)
        return tuple(map(_widened, batch)) if self._wide else batch


def mean(present: list[Tensor], size: int) -> Tensor:
    """Return the sum of tensors, divided by `size`, in float64 or complex128."""
    wide = torch.complex128 if present[0].is_complex() else torch.float64
    return torch.stack([tensor.to(wide) for tensor in present]).sum(0) / size


def narrow_mean(present: list[Tensor], size: int) -> Tensor:
    """Return the same in the tensors' own dtype, as libraries add them."""
    return sum((tensor / size for tensor in present[1:]), present[0] / size)


def narrow_sum(present: list[Tensor], _size: int) -> Tensor:
    """Return the sum of gradients of divided losses in the tensors' own dtype."""
    return sum(present[1:], present[0])


@lru_cache(maxsize=8)
def truth(model: Model, loop: Loop, size: int) -> Truth:
    """Return what `loop` should do with `model` on `size` ranks.

    Raises:
        Exception: the loop fails with this model in one process too.
    """
    return Truth(model, loop, size)


def _results(model: Model, loop: Loop, size: int, wide: bool, average: Average) -> list[Result]:
    meeting, results = Meeting(size), [Result() for _ in range(size)]

    def target(rank: int) -> None:
        run = Alone(model, rank, meeting, wide, average)
        try:
            loop.train(run)
            results[rank].take(run)
            handles = [handle for handle in run.handles if isinstance(handle, Exact)]
            results[rank].own = [handle.own for handle in handles]
        except BaseException as error:
            results[rank].error = error
            meeting.barrier.abort()

    with default_dtype(torch.float64 if wide else torch.float32):
        threads = [threading.Thread(target=target, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    errors = [result.error for result in results if result.error]
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    if errors:
        raise errors[0]
    every = (weight for result in results for named in result.weights for weight in named.values())
    if not all(bool(weight.isfinite().all()) for weight in every):
        raise DoesNotApply("in one process, weights become infinite or NaN too")
    return results


@contextmanager
def default_dtype(dtype: torch.dtype) -> Generator[None]:
    """Let torch make tensors of another dtype, in all threads."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _fill(tensor: Tensor, values: Tensor) -> None:
    """Copy values to a tensor of any layout; of expanded ones, those that lie in one place once."""
    if tensor.layout != torch.strided:
        tensor.data = values.detach().to(tensor.dtype)
        return
    for dim, stride in enumerate(tensor.stride()):
        if not stride and tensor.shape[dim]:
            tensor, values = tensor.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    tensor.detach().copy_(values)


def _tensors(net: nn.Module) -> list[Tensor]:
    return [*net.parameters(), *net.buffers()]


def _widened(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
