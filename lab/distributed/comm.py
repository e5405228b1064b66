"""Comm: the few collectives that exchanges are written with, and a count of what they send."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

Transfer = tuple[Tensor, int]  # a tensor, and the rank that it goes to or comes from


class Handle(Protocol):
    """Transfers under way."""

    def wait(self) -> Any:
        """Return when the caller may use what was received, and write to what was sent."""


class Collective(Handle, Protocol):
    """A collective under way."""

    def is_completed(self) -> bool:
        """Whether it is done. May be asked from any thread."""
        ...


class Done:
    """A collective that was done when the call returned."""

    def wait(self) -> None:
        """Return at once."""

    def is_completed(self) -> bool:
        return True


@dataclass
class Traffic:
    """What one rank handed to the network: bytes of payload, and messages."""

    payload_bytes: int = 0
    num_messages: int = 0


class Comm(ABC):
    """Collectives over `size` ranks, on contiguous tensors.

    Those whose names begin with i return what to wait for, before its tensors are used again; the
    others block the stream. Ranks must begin all collectives in the same order, but for one liberty
    where `asynchronous`: an iall_gather has connections of its own, so that it may be begun before
    or after an iall_reduce or iall_to_all that it has no part in.

    `traffic` counts this rank's payload. For send and recv that is what was passed in. A library
    collective chooses its own path, so it is booked as the bandwidth-optimal algorithm's bytes:
    a ring for all_reduce, 2(N-1)/N of the tensor, and N-1 blocks for all_gather and all_to_all
    (nccl-tests, doc/PERFORMANCE.md). tests/distributed/test_wire.py holds these figures against
    the bytes that really crossed the loopback interface.

    Attributes:
        backend: what carries the tensors, as a record names it.
        no_send_recv: why send and recv cannot be used, where they cannot.
        asynchronous: what names with an i begin runs on the library's own threads.
        settings: what the library was told when it connected, as a record shows it.
    """

    backend: str
    no_send_recv: str | None = None
    asynchronous = False

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.traffic = Traffic()
        self.settings: dict[str, str] = {}

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace `tensor` by its sum over the ranks."""
        self.iall_reduce(tensor).wait()

    def all_gather(self, output: Tensor, tensor: Tensor) -> None:
        """Fill `output` [size, ...] with every rank's `tensor` [...], in rank order."""
        self.iall_gather(output, tensor).wait()

    def all_to_all(self, output: Tensor, tensor: Tensor) -> None:
        """Send `tensor[r]` [size, ...] to rank r; `output[r]` receives what rank r sent here."""
        self.iall_to_all(output, tensor).wait()

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Replace `tensor` by rank `source`'s. Used at start-up, so booked as one copy sent."""
        self.ibroadcast(tensor, source).wait()

    def iall_reduce(self, tensor: Tensor) -> Collective:
        """Begin an all_reduce."""
        if self.size == 1:
            return Done()
        self._count(2 * (self.size - 1) * tensor.nbytes // self.size, 2 * (self.size - 1))
        return self._iall_reduce(tensor)

    def iall_gather(self, output: Tensor, tensor: Tensor) -> Collective:
        """Begin an all_gather."""
        if self.size == 1:
            output.view_as(tensor).copy_(tensor)
            return Done()
        self._count((self.size - 1) * tensor.nbytes, self.size - 1)
        return self._iall_gather(output, tensor)

    def iall_to_all(self, output: Tensor, tensor: Tensor) -> Collective:
        """Begin an all_to_all."""
        if self.size == 1:
            output.copy_(tensor)
            return Done()
        self._count((self.size - 1) * tensor.nbytes // self.size, self.size - 1)
        return self._iall_to_all(output, tensor)

    def ibroadcast(self, tensor: Tensor, source: int) -> Collective:
        """Begin a broadcast."""
        if self.size == 1:
            return Done()
        if self.rank == source:
            self._count(tensor.nbytes, 1)
        return self._ibroadcast(tensor, source)

    def send(self, tensor: Tensor, to: int) -> None:
        """Send `tensor` to rank `to`, which must call recv."""
        self.isend_irecv([(tensor, to)], []).wait()

    def recv(self, tensor: Tensor, source: int) -> None:
        """Fill `tensor` with what rank `source` sends."""
        self.isend_irecv([], [(tensor, source)]).wait()

    def isend_irecv(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> Handle:
        """Begin to send and to receive all of these at once; `wait` for them before the next use.

        Transfers from one rank to another arrive in the order in which they were begun. Several
        batches may be under way, and must be waited for in their order. Within a batch no transfer
        waits for another, but a batch may wait for the one before it: NCCL runs a rank's batches
        one by one on a stream. So batches must be such that this cannot end in a circle. It is
        enough that every rank's t-th batch sends just what other ranks' t-th batches receive.
        """
        for tensor, _ in sends:
            self._count(tensor.nbytes, 1)
        return self._isend_irecv(sends, receives)

    def _count(self, payload_bytes: int, num_messages: int) -> None:
        self.traffic.payload_bytes += payload_bytes
        self.traffic.num_messages += num_messages

    @abstractmethod
    def _iall_reduce(self, tensor: Tensor) -> Collective: ...
    @abstractmethod
    def _iall_gather(self, output: Tensor, tensor: Tensor) -> Collective: ...
    @abstractmethod
    def _iall_to_all(self, output: Tensor, tensor: Tensor) -> Collective: ...
    @abstractmethod
    def _ibroadcast(self, tensor: Tensor, source: int) -> Collective: ...

    def _isend_irecv(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> Handle:
        raise NotImplementedError(self.no_send_recv)
