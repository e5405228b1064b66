"""Comm: the few collectives that exchanges use, with a count of the bytes they send."""

from __future__ import annotations

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from lab.distributed.launcher import Nodes, each_alone, restricted

CACHED_VALUES = 2**16  # a sum of so many stays in a core's cache while all parts are added
Sent = tuple[int, int, int]  # payload bytes, messages, and the bytes of these to other nodes
Transfer = tuple[Tensor, int]  # a tensor, and the rank that it goes to or comes from
TIMEOUT_S = 30.0  # longest wait for another rank


class Handle(Protocol):
    """Transfers in flight."""

    def wait(self) -> Any:
        """Block until received tensors may be read and sent ones written to."""


class Collective(Handle, Protocol):
    """A collective in flight."""

    def is_completed(self) -> bool:
        """Return whether it has finished. Any thread may call this."""
        ...


class Completed:
    """A collective that had finished when its call returned."""

    def wait(self) -> None: ...

    def is_completed(self) -> bool:
        return True


class SummedParts:
    """A reduce-scatter made of an all-to-all: `wait` adds the parts that have arrived.

    Args:
        parts: [size, ...], one of each rank, complete after `arriving.wait()`.
        output: receives their sum, added in rank order.
    """

    def __init__(self, arriving: Collective, parts: Tensor, output: Tensor) -> None:
        self._arriving, self._parts, self._output = arriving, parts, output

    def wait(self) -> None:
        self._arriving.wait()
        parts = self._parts.view(len(self._parts), -1).split(CACHED_VALUES, dim=1)
        for part, total in zip(parts, self._output.view(-1).split(CACHED_VALUES), strict=True):
            _sum(part, total)

    def is_completed(self) -> bool:
        return self._arriving.is_completed()


def _sum(parts: Tensor, total: Tensor) -> None:
    """Fill `total` [n] with the sum over the rows of `parts` [size, n], in the type of `total`."""
    if len(parts) > 1 and parts.dtype == total.dtype:  # saves a pass over `total`
        torch.add(parts[0], parts[1], out=total)
        others = parts[2:]
    else:
        total.copy_(parts[0])
        others = parts[1:]
    for other in others:
        total += other


@dataclass
class Traffic:
    """Payload bytes and messages that one rank handed to the network.

    Attributes:
        waited_s: seconds that the host spent in calls of the library, which wait for other ranks.
        across_bytes: the part of `payload_bytes` that went to other nodes.
    """

    payload_bytes: int = 0
    num_messages: int = 0
    waited_s: float = 0.0
    across_bytes: int = 0

    def count(self, payload_bytes: int, num_messages: int, across_bytes: int) -> None:
        """Add what was just handed to the network."""
        self.payload_bytes += payload_bytes
        self.num_messages += num_messages
        self.across_bytes += across_bytes

    def so_far(self) -> Sent:
        """Return the counts of bytes and messages, which later traffic does not change."""
        return self.payload_bytes, self.num_messages, self.across_bytes

    @contextmanager
    def uncounted(self) -> Generator[None]:
        """Put the counts back at the end, in place: comms that were split from one share them."""
        before = vars(self).copy()
        yield
        vars(self).update(before)


class _Waited:
    """Transfers in flight, whose waits are counted."""

    __slots__ = "_handle", "_traffic"

    def __init__(self, handle: Any, traffic: Traffic) -> None:
        self._handle, self._traffic = handle, traffic

    def wait(self) -> None:
        began = time.perf_counter()
        self._handle.wait()
        self._traffic.waited_s += time.perf_counter() - began

    def is_completed(self) -> bool:
        return self._handle.is_completed()


class NoWindow(Exception):  # noqa: N818  # nothing went wrong: there are other ways
    """Ranks cannot read each other's memory; says why. All ranks of a comm raise it alike."""


@dataclass(frozen=True)
class Window:
    """Memory of each rank that all ranks read and write, without a message.

    Attributes:
        rows: uint8 [bytes] of each rank, zeros at first, in rank order: a tensor [ranks, bytes], or
            as many tensors, where each rank has the memory at addresses of its own.
        handle: what the library knows it by.
    """

    rows: Tensor | Sequence[Tensor]
    handle: Any = None


class Comm(ABC):
    """Collectives over `size` ranks, on contiguous tensors.

    Methods whose names begin with i return a handle, to wait for before their tensors are used
    again; the others block the stream. All ranks must begin all collectives in the same order,
    with one exception if `asynchronous`: iall_gather has its own connections, so it may begin
    before or after an unrelated iall_reduce, iall_to_all or ireduce_scatter.

    `traffic` counts this rank's payload. For send and recv that is the size of the tensor. A
    library collective chooses its own path, so it counts as the bandwidth-optimal algorithm does:
    a ring for all_reduce, 2(N-1)/N of the tensor, and N-1 blocks for all_gather, all_to_all and
    reduce_scatter (nccl-tests, doc/PERFORMANCE.md). tests/distributed/test_wire.py compares these
    figures with the bytes that crossed the loopback interface. Rings pass a node's ranks in their
    order, so of a ring's bytes those of a rank go to another node whose next rank is on one.

    Attributes:
        backend: the library that carries the tensors, as a record names it.
        no_send_recv: the reason why send and recv are not available; None if they are.
        no_split: the reason why `split` is not available; None if it is.
        no_windows: the reason why `window` is not available, even on one node; None if it may be.
        asynchronous: the i-methods run on the library's own threads.
        settings: environment variables that the library was given, as a record shows them.
        before_sending: called before tensors are handed to the network, to emulate a rank that is
            slow to do so; None: nothing is.
        nodes: the ranks of each node; each alone, until whoever knows more says so.
        times_waits: the host waits in calls of the library, and `traffic` counts for how long.
    """

    backend: str
    no_send_recv: str | None = None
    no_split: str | None = None
    no_windows: str | None = "their library cannot share memory"
    asynchronous = False
    times_waits = True

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.traffic = Traffic()
        self.settings: dict[str, str] = {}
        self.before_sending: Callable[[], None] | None = None
        self.nodes = each_alone(size)
        self._beside: dict[str, Comm] = {}

    @property
    def nodes(self) -> Nodes:
        return self._nodes

    @nodes.setter
    def nodes(self, nodes: Nodes) -> None:
        self._nodes = nodes
        own = [node for node in nodes if self.rank in node]
        if not own:
            raise LookupError(f"rank {self.rank} is not on any of the nodes {nodes}")
        self._node = frozenset(own[0])
        self._num_beyond = self.size - len(own[0])  # ranks on other nodes
        self._ring_leaves = (self.rank + 1) % self.size not in self._node

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace `tensor` by its sum over the ranks."""
        self.iall_reduce(tensor).wait()

    def all_gather(self, output: Tensor, tensor: Tensor) -> None:
        """Fill `output` [size, ...] with every rank's `tensor` [...], in rank order."""
        self.iall_gather(output, tensor).wait()

    def reduce_scatter(self, output: Tensor, tensor: Tensor) -> None:
        """Fill `output` [...] with the sum over the ranks of their `tensor[rank]` [size, ...]."""
        self.ireduce_scatter(output, tensor).wait()

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Replace `tensor` by rank `source`'s. Used at start-up, so counted as one copy sent."""
        self.ibroadcast(tensor, source).wait()

    def iall_reduce(self, tensor: Tensor) -> Collective:
        if self.size == 1:
            return Completed()
        self._announce()
        self.count_all_reduce(tensor.nbytes)
        return self._begin(self._iall_reduce, tensor)

    def iall_gather(self, output: Tensor, tensor: Tensor) -> Collective:
        if self.size == 1:
            output.view_as(tensor).copy_(tensor)
            return Completed()
        self._announce()
        self.count_ring((self.size - 1) * tensor.nbytes, self.size - 1)
        return self._begin(self._iall_gather, output, tensor)

    def iall_gather_rows(self, rows: Tensor) -> Collective:
        """Begin an all_gather in place: row `rank` of `rows` [size, ...] is sent to all others.

        It need not tell that it is complete before a wait, so nothing should follow it in a job.
        """
        return self._iall_gather_rows(rows) if self.size > 1 else Completed()

    def iall_to_all(self, output: Tensor, tensor: Tensor) -> Collective:
        """Send `tensor[r]` [size, ...] to rank r; `output[r]` receives what rank r sent here."""
        if self.size == 1:
            output.copy_(tensor)
            return Completed()
        self._announce()
        self._count_pairs(tensor.nbytes // self.size)
        return self._begin(self._iall_to_all, output, tensor)

    def ireduce_scatter(
        self, output: Tensor, tensor: Tensor, parts: Tensor | None = None
    ) -> Collective:
        """Begin a reduce_scatter.

        Args:
            parts: like `tensor`, memory that a library without an optimal reduce_scatter may use;
                None: it allocates some. Gloo's own sends as much as its all-reduce.
        """
        if self.size == 1:
            output.copy_(tensor.view_as(output))
            return Completed()
        self._announce()
        self._count_pairs(tensor.nbytes // self.size)
        return self._ireduce_scatter(output, tensor, parts)

    def ibroadcast(self, tensor: Tensor, source: int) -> Collective:
        if self.size == 1:
            return Completed()
        if self.rank == source:
            self._announce()
            self.traffic.count(tensor.nbytes, 1, tensor.nbytes if len(self.nodes) > 1 else 0)
        return self._begin(self._ibroadcast, tensor, source)

    def send(self, tensor: Tensor, to: int) -> None:
        """Send `tensor` to rank `to`, which must call recv."""
        self.isend_irecv([(tensor, to)], []).wait()

    def recv(self, tensor: Tensor, source: int) -> None:
        """Receive `tensor` from rank `source`, which must call send."""
        self.isend_irecv([], [(tensor, source)]).wait()

    def isend_irecv(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> Handle:
        """Begin a batch of sends and receives; `wait` before their tensors are used again.

        Transfers from one rank to another arrive in the order in which they began. Several batches
        may be in flight; wait for them in order. Transfers of one batch do not wait for each
        other, but a batch may wait for the one before it: NCCL runs a rank's batches one by one on
        a stream. The caller must rule out a deadlock. It is enough that every rank's t-th batch
        sends exactly what other ranks' t-th batches receive.
        """
        if sends:
            self._announce()
        for tensor, to in sends:
            self.traffic.count(tensor.nbytes, 1, 0 if to in self._node else tensor.nbytes)
        return self._begin(self._isend_irecv, sends, receives)

    def split(self, color: int) -> Comm:
        """Return a Comm of the ranks that gave the same `color`; all ranks call this.

        It counts into this comm's `traffic`, and numbers its ranks in the order of this one's.

        Raises:
            ValueError: see `no_split`.
        """
        if self.no_split:
            raise ValueError(self.no_split)
        part, members = self._split(color)
        part.traffic, part.settings = self.traffic, self.settings
        part.nodes = restricted(self.nodes, members)
        part.before_sending = self._announce
        return part

    def window(self, num_bytes: int, device: torch.device) -> Window:
        """Return memory of `num_bytes` for each rank; all ranks call this, and wait for each other.

        Raises:
            NoWindow: there is none, as where ranks are on several nodes.
        """
        if self.size == 1:
            return Window(torch.zeros(1, num_bytes, dtype=torch.uint8, device=device))
        several = f"they are on {len(self.nodes)} nodes" if len(self.nodes) > 1 else None
        if reason := several or self.no_windows:
            raise NoWindow(reason)
        return self._window(num_bytes, device)

    def imeet(self, window: Window, num_bytes: int, last: bool) -> Collective:
        """Begin to wait until all ranks have come: then each sees what others wrote before.

        Two in turn divide the use of a window: what is written before one of them is read before
        the next one, by others or by its owner, and not overwritten meanwhile.

        Args:
            num_bytes: that each rank writes for each other one before this, or reads after it.
            last: of the two. This one is for iall_gather what the other is for iall_reduce: they
                have connections of their own.
        """
        if self.size == 1:
            return Completed()
        self._announce()
        self._count_pairs(num_bytes)
        return self._begin(self._imeet, window, num_bytes, last)

    def dup(self, name: str) -> Comm:
        """Return a Comm of the same ranks over connections of its own, the same for each `name`.

        It is made at the first call, which waits for all ranks. A comm that is not `asynchronous`
        returns itself: there, calls follow each other.
        """
        if not self.asynchronous or self.size == 1:
            return self
        if name not in self._beside:
            self._beside[name] = self.split(0)
        return self._beside[name]

    def count_all_reduce(self, num_bytes: int) -> None:
        """Count an all-reduce of `num_bytes`, of this comm or of a library beside it."""
        steps = 2 * (self.size - 1)
        self.count_ring(steps * num_bytes // self.size, steps)

    def count_ring(self, payload_bytes: int, num_messages: int) -> None:
        """Count what this rank sends around a ring, of this comm or of a library beside it."""
        across = payload_bytes if self._ring_leaves else 0
        self.traffic.count(payload_bytes, num_messages, across)

    def _announce(self) -> None:
        if self.before_sending:
            self.before_sending()

    def _begin(self, call: Callable[..., Any], *arguments: Any) -> Collective:
        began = time.perf_counter()
        handle = call(*arguments)  # some libraries wait here
        if self.times_waits:
            self.traffic.waited_s += time.perf_counter() - began
        if handle is None:
            return Completed()
        return _Waited(handle, self.traffic) if self.times_waits else handle

    def _count_pairs(self, num_bytes: int) -> None:
        others = self.size - 1
        self.traffic.count(others * num_bytes, others, self._num_beyond * num_bytes)

    # How a library begins each call; None: there is nothing to wait for.

    @abstractmethod
    def _iall_reduce(self, tensor: Tensor) -> Collective | None: ...
    @abstractmethod
    def _iall_gather(self, output: Tensor, tensor: Tensor) -> Collective | None: ...
    @abstractmethod
    def _iall_to_all(self, output: Tensor, tensor: Tensor) -> Collective | None: ...
    @abstractmethod
    def _ibroadcast(self, tensor: Tensor, source: int) -> Collective | None: ...

    def _iall_gather_rows(self, rows: Tensor) -> Collective:
        return self.iall_gather(rows, rows[self.rank])

    def _ireduce_scatter(self, output: Tensor, tensor: Tensor, parts: Tensor | None) -> Collective:
        parts = torch.empty_like(tensor) if parts is None else parts
        return SummedParts(self._begin(self._iall_to_all, parts, tensor), parts, output)

    def _isend_irecv(
        self, sends: Sequence[Transfer], receives: Sequence[Transfer]
    ) -> Handle | None:
        raise NotImplementedError(self.no_send_recv)

    def _window(self, num_bytes: int, device: torch.device) -> Window:
        raise NotImplementedError(self.no_windows)

    def _imeet(self, window: Window, num_bytes: int, last: bool) -> Collective | None:
        raise NotImplementedError(self.no_windows)

    def _split(self, color: int) -> tuple[Comm, list[int]]:
        """Return the group of `color`, and which of this comm's ranks it has."""
        raise NotImplementedError(self.no_split)


class SilentComm(Comm):
    """A rank of another Comm in whose collectives all other ranks seem to have the same tensors.

    So an exchange does all that it would do, with messages of the right form, except to wait.

    Args:
        like: the Comm to imitate; its own `traffic` is left alone.
    """

    backend = "silent"
    no_split = "a silent Comm has no groups"

    def __init__(self, like: Comm) -> None:
        super().__init__(like.rank, like.size)
        self.nodes, self.no_send_recv = like.nodes, like.no_send_recv
        self.no_windows = like.no_windows

    def _iall_reduce(self, tensor: Tensor) -> None: ...

    def _iall_gather(self, output: Tensor, tensor: Tensor) -> None:
        output.view(self.size, -1).copy_(tensor.view(1, -1))

    def _iall_to_all(self, output: Tensor, tensor: Tensor) -> None:
        output.copy_(tensor)

    def _ibroadcast(self, tensor: Tensor, source: int) -> None: ...

    def _isend_irecv(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> None:
        for tensor, _ in receives:
            tensor.zero_()

    def _window(self, num_bytes: int, device: torch.device) -> Window:
        own = torch.zeros(1, num_bytes, dtype=torch.uint8, device=device)
        return Window(own.expand(self.size, num_bytes))

    def _imeet(self, window: Window, num_bytes: int, last: bool) -> None: ...


class _Meeting:
    """Shared state of the ranks: a barrier, a slot each, a mailbox for each pair, and parts."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=TIMEOUT_S)
        self.slots: list[Tensor] = [torch.empty(0)] * size
        self.mail = {(a, b): queue.SimpleQueue() for a in range(size) for b in range(size)}
        self.parts: dict[tuple[int, int], _Meeting] = {}  # by number of the split and by color


class Expected(list[tuple[Tensor, queue.SimpleQueue]]):
    """Receives in flight: each tensor with the mailbox that its values come from."""

    def wait(self) -> None:
        for tensor, mailbox in self:
            tensor.copy_(mailbox.get(timeout=TIMEOUT_S))


class ThreadComm(Comm):
    """One rank among `size` threads, made by `run_ranks`. Sums add in rank order."""

    backend = "threads"
    no_windows = None

    def __init__(self, rank: int, size: int, meeting: _Meeting) -> None:
        super().__init__(rank, size)
        self.meeting = meeting
        self._num_splits = 0

    def _everyones(self, tensor: Tensor) -> list[Tensor]:
        return self._shown(tensor.clone())

    def _shown(self, own: Tensor) -> list[Tensor]:
        """Show a tensor to all ranks; return what each shows."""
        self.meeting.slots[self.rank] = own
        self.meeting.barrier.wait()
        tensors = list(self.meeting.slots)
        self.meeting.barrier.wait()
        return tensors

    def _iall_reduce(self, tensor: Tensor) -> None:
        first, *others = self._everyones(tensor)
        tensor.copy_(first)
        for other in others:
            tensor += other

    def _iall_gather(self, output: Tensor, tensor: Tensor) -> None:
        output.copy_(torch.stack(self._everyones(tensor)).view_as(output))

    def _iall_to_all(self, output: Tensor, tensor: Tensor) -> None:
        output.copy_(torch.stack([sent[self.rank] for sent in self._everyones(tensor)]))

    def _ibroadcast(self, tensor: Tensor, source: int) -> None:
        tensor.copy_(self._everyones(tensor)[source])

    def _isend_irecv(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> Handle:
        for tensor, to in sends:
            self.meeting.mail[self.rank, to].put(tensor.clone())
        mail = self.meeting.mail
        return Expected((tensor, mail[source, self.rank]) for tensor, source in receives)

    def _window(self, num_bytes: int, device: torch.device) -> Window:
        return Window(self._shown(torch.zeros(num_bytes, dtype=torch.uint8, device=device)))

    def _imeet(self, window: Window, num_bytes: int, last: bool) -> None:
        self.meeting.barrier.wait()

    def _split(self, color: int) -> tuple[ThreadComm, list[int]]:
        colors = [int(other) for other in self._everyones(torch.tensor(color))]
        members = [rank for rank, other in enumerate(colors) if other == color]
        self._num_splits += 1
        key = self._num_splits, color
        meeting = self.meeting.parts.setdefault(key, _Meeting(len(members)))  # atomic
        return ThreadComm(members.index(self.rank), len(members), meeting), members


def run_ranks(size: int, rank_main: Callable[[Comm], Any], nodes: Nodes | None = None) -> list[Any]:
    """Run `rank_main(comm)` as `size` ranks, one thread each; return their results in rank order.

    Args:
        nodes: the ranks of each node to play; None: each has its own.

    Raises:
        Exception: the first rank's error, once every rank has stopped.
    """
    meeting, errors = _Meeting(size), list[BaseException]()

    def target(rank: int) -> Any:
        comm = ThreadComm(rank, size, meeting)
        comm.nodes = nodes or comm.nodes
        try:
            return rank_main(comm)
        except BaseException as error:
            errors.append(error)
            meeting.barrier.abort()

    with ThreadPoolExecutor(size) as ranks:
        results = list(ranks.map(target, range(size)))
    if errors:
        raise errors[0]
    return results
