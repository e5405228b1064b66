"""Stages of an exchange, recorded from its own code.

It runs on tensors without values, over a comm that sends nothing. The comm notes what it is asked
to send; kernels of codecs, and operations of plain torch, note how much memory they would pass
over. Where ranks send to each other one by one, all of them are recorded and their transfers
followed in time.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lab.codec.base import DEFINING, Codec, Reference
from lab.codec.kernels import Peers
from lab.codec.layout import MessageLayout
from lab.distributed.comm import Collective, Comm, Completed, Handle, Transfer, Window
from lab.exchange.base import Exchange, iter_nested
from lab.exchange.bucket import GradBucket, Plans
from lab.exchange.compressed import Coded, TwoStage
from lab.exchange.cost import Shape
from lab.exchange.scatter import GATHERED, gather_bytes, scatter_of
from lab.exchange.scatter import ScatterLayout as Columns
from lab.settings.errors import ConfigError
from lab.settings.own_code import is_labs
from lab.simulate.costs import Load, Stage

META = torch.device("meta")
AFTER_WARMUP = 2**62  # a step
TRIED = 2**14  # values of a user's codec
MOST_RANKS = 2**14  # of which messages are laid out, in time that grows with their number
ADDRESSES = ("empty", "empty_like", "new_empty", "empty_strided", "resize_")  # move no values
WRITES = ("copy_", "_foreach_copy_", "zero_", "fill_")  # read nothing of their first argument


@dataclass
class MemoryTraffic:
    """Bytes of memory that are read and written."""

    num_bytes: float
    calls: int = 1

    def __add__(self, other: MemoryTraffic) -> MemoryTraffic:
        return MemoryTraffic(self.num_bytes + other.num_bytes, self.calls + other.calls)


class Collected(NamedTuple):
    """A collective: the method of Network that tells its cost, and that method's argument."""

    call: str
    num_bytes: float


class Posted(NamedTuple):
    """Transfers that begin: the bytes and other rank of each, and the number of their wait."""

    sends: tuple[tuple[float, int], ...]
    receives: tuple[int, ...]
    number: int


class Waited(NamedTuple):
    """A wait for the transfers of a number."""

    number: int


Event = MemoryTraffic | Collected | Posted | Waited


def add_stages(load: Load, exchange: Exchange, part: str = "whole") -> None:
    """Append the stages of a bucket.

    Args:
        part: "whole"; of a TwoStage, whose ranks decode the same message at last, "sum" until they
            have it, and "decode" after that;
            "scatter": its reduce-scatter alone, of shapes that all ranks have as much of.

    Raises:
        ValueError: its code does not run without values, or there are more than MOST_RANKS.
    """
    if load.N > MOST_RANKS:
        raise ValueError(
            f"world_size={load.N}: exchange={load.rate} is predicted from its code, on at most "
            f"{MOST_RANKS} ranks"
        )
    events = _events(exchange, tuple(load.shapes), load.N, part, 0)
    if any(isinstance(event, Posted) for event in events):
        every = [_events(exchange, tuple(load.shapes), load.N, part, r) for r in range(load.N)]
        load.stages.append(_followed(every, load))
    else:
        _add(events, load)


def _add(events: Sequence[Event], load: Load) -> None:
    for event in events:
        if isinstance(event, MemoryTraffic):
            load.codec(event.num_bytes, event.calls)
        elif isinstance(event, Collected):
            load.wire(getattr(load.network, event.call)(event.num_bytes))


def _bucket(shapes: Sequence[Shape], step: int) -> GradBucket:
    named = {str(number): torch.Size(shape) for number, shape in enumerate(shapes)}
    flat = torch.empty(sum(shape.numel() for shape in named.values()), device=META)
    return GradBucket(named, flat, AFTER_WARMUP + step)


@lru_cache(maxsize=10_000)
def _events(
    exchange: Exchange, shapes: tuple[Shape, ...], size: int, part: str, rank: int
) -> tuple[Event, ...]:
    """Record a step of a bucket, after one in which what stays is laid out."""
    recorder = RecordingComm(rank, size)
    try:
        own, first = deepcopy(exchange), _bucket(shapes, 0)
        for each in iter_nested(own):
            if isinstance(each, Coded):
                _note_kernels(each.codec, recorder.events)
        second = _bucket(shapes, 1)
        second.plans, second.flat = first.plans, first.flat
        second.divided = own.accepts_prescaled
        for bucket in (first, second):
            recorder.events.clear()
            with Passes(recorder.events):
                _run(own, bucket, recorder, part)
    except (RuntimeError, NotImplementedError, TypeError) as error:  # TypeError: of copies, numpy
        why = str(error).splitlines()[0]
        raise ConfigError(
            f"exchange={type(exchange).__name__}: cannot be predicted from its code, which "
            f"cannot run on tensors without values ({why}); implement add_cost"
        ) from error
    joined = list[Event]()  # passes over memory that follow each other are one
    for event in recorder.events:
        if (
            isinstance(event, MemoryTraffic)
            and joined
            and isinstance(before := joined[-1], MemoryTraffic)
        ):
            joined[-1] = before + event
        else:
            joined.append(event)
    return tuple(joined)


def _note_kernels(codec: Codec, events: list[Event]) -> None:
    kernels = Noting(codec, events)
    codec.kernels = lambda device: kernels


def _run(exchange: Exchange, bucket: GradBucket, comm: RecordingComm, part: str) -> None:
    if part == "whole":
        exchange.average(bucket, comm)
    elif part == "scatter":
        parts = bucket.flat.view(comm.size, -1)
        columns = bucket.plans.setdefault("columns", Columns({}))
        scatter_of(exchange).sum(torch.empty_like(parts[0]), parts, comm, columns)
    else:
        assert isinstance(exchange, TwoStage)
        num_bytes = exchange.layout(bucket, comm.size).num_bytes
        message = torch.empty(num_bytes, dtype=torch.uint8, device=META)
        if part == "sum":
            for collective in exchange.sum(bucket, comm, message):
                collective.wait()
        else:
            exchange.decode(message, bucket, comm.size, comm.size)


@lru_cache(maxsize=1000)
def _gathered(num_values: int, size: int) -> tuple[Event, ...]:
    codec, recorder, plans = deepcopy(GATHERED), RecordingComm(0, size), Plans()
    _note_kernels(codec, recorder.events)
    weights = torch.empty(size, num_values, device=META)
    gather_bytes(weights.view(-1), weights[0], recorder, plans, codec)
    return tuple(recorder.events)


def add_gather(load: Load) -> None:
    """Append the stages of an all-gather of weights in bytes; see lab.exchange.scatter."""
    _add(_gathered(load.n // load.N, load.N), load)


class RecordingComm(Comm):
    """A rank among `size`, whose collectives are noted and move nothing."""

    backend = "none"

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.events = list[Event]()
        self._batches = 0

    def _iall_reduce(self, tensor: Tensor) -> Collective:
        return self._noted("all_reduce", tensor.nbytes)

    def _iall_gather(self, output: Tensor, tensor: Tensor) -> Collective:
        return self._noted("all_gather", tensor.nbytes)

    def _iall_to_all(self, output: Tensor, tensor: Tensor) -> Collective:
        return self._noted("all_to_all", tensor.nbytes / self.size)

    def _ireduce_scatter(self, output: Tensor, tensor: Tensor, parts: Tensor | None) -> Collective:
        return self._noted("reduce_scatter", tensor.nbytes / self.size)

    def _ibroadcast(self, tensor: Tensor, source: int) -> Collective:
        raise NotImplementedError("it calls broadcast")

    def _isend_irecv(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> Handle:
        self._batches += 1
        sizes = tuple((tensor.nbytes, to) for tensor, to in sends)
        sources = tuple(source for _, source in receives)
        self.events.append(Posted(sizes, sources, self._batches))
        return _Batch(self._batches, self.events)

    def window(self, num_bytes: int, device: torch.device) -> Window:
        return Window(torch.empty(self.size, num_bytes, dtype=torch.uint8, device=device))

    def _imeet(self, window: Window, num_bytes: int, last: bool) -> Collective:
        return self._noted("all_gather" if last else "all_to_all", num_bytes)

    def _noted(self, call: str, num_bytes: float) -> Completed:
        self.events.append(Collected(call, num_bytes))
        return Completed()


class _Batch(NamedTuple):
    number: int
    events: list[Event]

    def wait(self) -> None:
        self.events.append(Waited(self.number))


class Passes(TorchDispatchMode):
    """Notes the bytes that operations of plain torch read and write."""

    def __init__(self, events: list[Event]) -> None:
        super().__init__()
        self._events = events

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing here is compiled, and to skip it torch loads its compiler: a second

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.is_view or name in ADDRESSES:
            return out
        read = args[name in WRITES :], {k: v for k, v in (kwargs or {}).items() if k != "out"}
        passed = tree_leaves((read, args[:1] if out is None else out))
        moved = float(sum(each.nbytes for each in passed if isinstance(each, Tensor)))
        self._events.append(MemoryTraffic(moved, calls=0))  # few beside the kernels of a codec
        return out


class Noting(Reference):
    """Kernels that do nothing but note what they would move.

    A user's codec has none, so its plain torch counts, and 12 bytes to add a value to another.
    """

    def __init__(self, codec: Codec, events: list[Event]) -> None:
        super().__init__(codec)
        self._events, self._in_torch = events, moved_in_torch(codec)

    def encode(
        self,
        layout: MessageLayout,
        values: Tensor,
        residual: Tensor | None,
        message: Tensor,
        finite: Tensor | None = None,
    ) -> None:
        n, keeps = layout.num_values, residual is not None
        moved = (4 + 8 * keeps) * n + layout.num_bytes + self._codec.also_moved(layout)
        self._moved(moved, lambda write, read: (write + keeps * (read + 24)) * n)

    def add_up(
        self, layout: MessageLayout, messages: Tensor, out: Tensor, divisor: int, finite: Tensor
    ) -> None:
        n, count = layout.num_values, len(messages)
        moved = 4 * n + count * layout.num_bytes
        self._moved(moved, lambda write, read: (count * read + 12 * (count - 1)) * n)

    def reduce(
        self,
        layout: MessageLayout,
        messages: Tensor | Peers,
        residual: Tensor | None,
        out: Tensor | Peers,
    ) -> None:
        n, count, keeps = layout.num_values, len(messages), residual is not None
        moved = 8 * keeps * n + (count + 1) * layout.num_bytes
        self._moved(moved, lambda write, read: (count * (read + 12) + write) * n)

    def _moved(self, num_bytes: float, in_torch: Callable[[float, float], float]) -> None:
        self._events.append(
            MemoryTraffic(in_torch(*self._in_torch) if self._in_torch else num_bytes)
        )


def moved_in_torch(codec: Codec) -> tuple[float, float] | None:
    """Return the bytes that a user's `write` and `read` move for a value; None: it is the lab's."""
    if is_labs(type(codec), *DEFINING):
        return None
    columns = codec.row_of(TRIED).columns
    values = torch.randn(max(1, TRIED // columns), columns, device="cpu")
    header, payload = (
        values.new_zeros(len(values), num_bytes, dtype=torch.uint8)
        for num_bytes in codec.row_bytes(columns)
    )
    writes, reads = list[Event](), list[Event]()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        with Passes(writes):
            codec.write(values, header, payload)
        with Passes(reads):
            codec.read(header, payload, columns)
    write, read = (
        sum(event.num_bytes for event in events if isinstance(event, MemoryTraffic))
        / values.numel()
        for events in (writes, reads)
    )
    return write, read


@dataclass
class _Rank:
    """A rank whose events are followed in time.

    Attributes:
        out_s, in_s: when its connections have sent, and received, what is under way.
        ends_s: when the transfers of a batch end, by number; `open`: how many do not yet.
    """

    events: deque[Event]
    now_s: float = 0.0
    out_s: float = 0.0
    in_s: float = 0.0
    sent_bytes: float = 0.0
    ends_s: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    open: dict[int, int] = field(default_factory=lambda: defaultdict(int))


def _followed(every: Sequence[Sequence[Event]], load: Load) -> Stage:
    """Follow the events of all ranks in time; a rank sends and receives one message at a time."""
    ranks = [_Rank(deque(events)) for events in every]
    posted = _Transfers(ranks, load)
    while any(rank.events for rank in ranks):
        if not any(_advanced(n, rank, posted, load) for n, rank in enumerate(ranks)):
            raise ValueError(f"exchange={load.rate}: a rank waits for a message that no rank sends")
    sent_bytes = max(rank.sent_bytes for rank in ranks)
    return Stage("exchange", max(rank.now_s for rank in ranks), sent_bytes)


def _advanced(number: int, rank: _Rank, posted: _Transfers, load: Load) -> bool:
    """Follow a rank until it must wait; return whether it did anything."""
    before = len(rank.events)
    while rank.events:
        event = rank.events[0]
        if isinstance(event, Waited):
            if rank.open[event.number]:
                break
            rank.now_s = max(rank.now_s, rank.ends_s[event.number])
        elif isinstance(event, Posted):
            posted.begin(number, event)
        elif isinstance(event, MemoryTraffic):
            alone = Load(load.shapes, load.rate, load.network)
            alone.codec(event.num_bytes, event.calls)
            rank.now_s += alone.stages[0].seconds
        else:
            raise ValueError(
                f"exchange={load.rate}: cannot be predicted, because it mixes collectives with "
                "single messages"
            )
        rank.events.popleft()
    return len(rank.events) < before


class _Transfers:
    """Messages between every two ranks, in the order in which they began."""

    def __init__(self, ranks: Sequence[_Rank], load: Load) -> None:
        self._ranks, self._load = ranks, load
        self._sends: dict[tuple[int, int], deque[tuple[float, int, float]]] = defaultdict(deque)
        self._receives: dict[tuple[int, int], deque[tuple[int, float]]] = defaultdict(deque)

    def begin(self, number: int, event: Posted) -> None:
        rank = self._ranks[number]
        rank.open[event.number] = len(event.sends) + len(event.receives)
        for num_bytes, to in event.sends:
            rank.sent_bytes += num_bytes
            self._sends[number, to].append((num_bytes, event.number, rank.now_s))
            self._match(number, to)
        for source in event.receives:
            self._receives[source, number].append((event.number, rank.now_s))
            self._match(source, number)

    def _match(self, source: int, to: int) -> None:
        sends, receives = self._sends[source, to], self._receives[source, to]
        while sends and receives:
            num_bytes, sent_in, sent_s = sends.popleft()
            received_in, ready_s = receives.popleft()
            sender, receiver = self._ranks[source], self._ranks[to]
            begin_s = max(sent_s, ready_s, sender.out_s, receiver.in_s)
            end_s = begin_s + self._load.network.link(source, to).seconds(num_bytes)
            sender.out_s = receiver.in_s = end_s
            for rank, batch in ((sender, sent_in), (receiver, received_in)):
                rank.ends_s[batch] = max(rank.ends_s[batch], end_s)
                rank.open[batch] -= 1
