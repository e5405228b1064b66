"""The events of one rank's step: forward and backward by layer, and the exchanges.

The slowest rank stands for all, since all meet; the cost of a collective covers the other ranks.
The number of events depends on layers and buckets, not on the number of ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from lab.measure.spans import Span
from lab.simulate.load import Stage


@dataclass(frozen=True)
class Compute:
    """The seconds that a layer computes."""

    name: str
    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class Exchange:
    """A bucket's stages, which begin once `layer` (its index in forward) has its gradient.

    An index past the last layer: they begin with the step, as they belong to the previous step.
    """

    name: str
    layer: int
    stages: Sequence[Stage]


@dataclass
class Rank:
    """The clock of the computing thread, and the spans so far.

    Attributes:
        contention, burst_s: see Hardware.
        now_s: the time on that thread.
        free_s: when the links, or the thread or stream of exchanges, are free; and, where stages
            inside nodes go their own way, when the links there are.
    """

    contention: float
    burst_s: float = 0.0
    now_s: float = 0.0
    free_s: dict[bool, float] = field(default_factory=lambda: {False: 0.0, True: 0.0})
    spans: list[Span] = field(default_factory=list)

    @property
    def busy_until_s(self) -> float:
        """When no exchange is under way any more."""
        return max(self.free_s.values())

    def compute(self, row: str, name: str, seconds: float) -> None:
        """Advance the computing thread, slower while an exchange is under way."""
        busy_s = max(0.0, self.busy_until_s - self.now_s)
        delay_s = min(self.contention * seconds, busy_s * self.contention / (1 + self.contention))
        end_s = self.now_s + seconds + delay_s
        self._note(row, name, self.now_s, end_s)
        self.now_s = end_s

    def beside(self, stage: Stage, name: str, earliest_s: float, inside: bool = False) -> float:
        """Run a stage concurrently with compute, first in first out; return when it ends.

        Args:
            inside: beside those between nodes, too.
        """
        free_s = self.free_s[inside]
        start_s = max(earliest_s, free_s)
        shaped = stage.payload_bytes and not stage.inside
        saved_s = min(self.burst_s, start_s - free_s) if shaped else 0.0
        self.free_s[inside] = start_s + max(0.0, stage.seconds - saved_s)
        self._note(stage.row, name, start_s, self.free_s[inside])
        return self.free_s[inside]

    def wait_until(self, end_s: float) -> None:
        self.now_s = max(self.now_s, end_s)

    def _note(self, row: str, name: str, start_s: float, end_s: float) -> None:
        if end_s > start_s:
            self.spans.append(Span(0, row, name, start_s, end_s))


class Schedule(ABC):
    """The place where exchanges run; models the workers of lab.distributed.worker."""

    @abstractmethod
    def submit(self, exchange: Exchange, rank: Rank) -> None:
        """Start the exchange of a full bucket; earlier buckets have been submitted."""

    def advance(self, rank: Rank) -> None:
        """Continue pending exchanges when a gradient has arrived."""

    @abstractmethod
    def finish(self, rank: Rank, left: int = 0) -> None:
        """Wait for all exchanges but the last `left`."""


class Beside(Schedule):
    """Stages one after the other, concurrent with backward (ThreadWorker, StreamWorker).

    Both levels of a hierarchical exchange are on the one thread or stream.
    """

    def __init__(self) -> None:
        self._ends_s: list[float] = []

    def submit(self, exchange: Exchange, rank: Rank) -> None:
        for stage in exchange.stages:
            rank.beside(stage, exchange.name, rank.now_s)
        self._ends_s.append(rank.busy_until_s)

    def finish(self, rank: Rank, left: int = 0) -> None:
        if len(self._ends_s) > left:
            rank.wait_until(self._ends_s[-1 - left])


@dataclass
class _UnderWay:
    exchange: Exchange
    stages: Iterator[Stage]
    done_s: float = 0.0  # when the collective under way ends


class Turns(Schedule):
    """Stages on backward's thread, while the library's threads communicate (TurnsWorker).

    Codecs delay backward, and a stage begins no sooner than the next gradient's hook.
    """

    def __init__(self) -> None:
        self._under_way: deque[_UnderWay] = deque()

    def submit(self, exchange: Exchange, rank: Rank) -> None:
        job = _UnderWay(exchange, iter(exchange.stages))
        self._under_way.append(job)
        self._go_on(job, rank)

    def advance(self, rank: Rank) -> None:
        for job in tuple(self._under_way):
            if job.done_s > rank.now_s:
                return
            self._go_on(job, rank)

    def finish(self, rank: Rank, left: int = 0) -> None:
        while (awaited := len(self._under_way) - left) > 0:
            for job in tuple(self._under_way)[:awaited]:
                rank.wait_until(job.done_s)
                self._go_on(job, rank)

    def _go_on(self, job: _UnderWay, rank: Rank) -> None:
        """Encode or decode until the next collective is under way, or no stage is left."""
        for stage in job.stages:
            if stage.row == "exchange":
                job.done_s = rank.beside(stage, job.exchange.name, rank.now_s, stage.inside)
                return
            rank.compute(stage.row, job.exchange.name, stage.seconds)
        self._under_way.remove(job)


def both_passes(
    rank: Rank,
    layers: Sequence[Compute],
    exchanges: Sequence[Exchange],
    schedule: Schedule,
    micro_batches: int = 1,
    begin: Callable[[int], None] = lambda place: None,
) -> None:
    """Simulate forward and backward; exchanges start in their order, each when it is ready.

    Args:
        layers: in the order of forward; their times are those of one micro-batch.
        exchanges: in the order of buckets.
        micro_batches: passes over the layers; gradients are exchanged in the last one.
        begin: called before each layer's forward, with its place.
    """
    waiting = deque(exchanges)

    def submit_ready(place: int) -> None:
        while waiting and waiting[0].layer >= place:
            schedule.submit(waiting.popleft(), rank)

    submit_ready(len(layers))
    for number in range(1, micro_batches + 1):
        for place, layer in enumerate(layers):
            begin(place)
            rank.compute("forward", layer.name, layer.forward_s)
        for place, layer in reversed(list(enumerate(layers))):
            rank.compute("backward", layer.name, layer.backward_s)
            schedule.advance(rank)
            if number == micro_batches:
                submit_ready(place)
