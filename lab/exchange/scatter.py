"""Reduce-scatters of gradients that are laid out by the rank they go to, exact or compressed.

They are the first halves of exchanges by name: what that sends to one rank, in the same codec, with
the sums in float32 and in rank order. The second half, which sends means to all ranks, is left out:
a rank keeps its sum.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lab.codec import int4
from lab.codec.int8 import codec as int8
from lab.codec.onebit.message import Matrix, Message
from lab.distributed.collective import Collective, SummedParts
from lab.distributed.comm import Comm
from lab.exchange.allreduce import AllReduce
from lab.exchange.base import Exchange
from lab.exchange.bucket import ScratchBuffers
from lab.exchange.error_feedback import ErrorFeedback
from lab.exchange.int4 import Int4
from lab.exchange.int8 import Int8
from lab.exchange.onebit import OneBit


@dataclass(frozen=True)
class Columns:
    """A parameter's columns in gradients [N, n]: `inner` values for each of its own rows."""

    start: int
    stop: int
    inner: int


@dataclass
class Layout:
    """Where parameters lie in gradients [N, n], and memory that is kept from step to step.

    Attributes:
        columns: by parameter name. Row r holds each one's r-th part of N.
    """

    columns: Mapping[str, Columns]
    buffers: ScratchBuffers = field(default_factory=ScratchBuffers)


class Scatter(ABC):
    """A reduce-scatter. One object serves all units of a rank."""

    @abstractmethod
    def sum(self, output: Tensor, gradients: Tensor, comm: Comm, layout: Layout) -> None:
        """Fill `output`, float32 [n], with the sum over the ranks of their `gradients[rank]`.

        Args:
            gradients: float32 [N, n]; its memory may be overwritten.
        """


class Exact(Scatter):
    """Sends gradients as `dtype`; sums are in float32."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def sum(self, output: Tensor, gradients: Tensor, comm: Comm, layout: Layout) -> None:
        needed = self.needs_spare(comm)
        spare = layout.buffers["spare"].take(gradients, *gradients.shape) if needed else None
        self.begin(output, gradients, comm, spare).wait()

    def needs_spare(self, comm: Comm) -> bool:
        """Return whether `begin` needs memory for what travels; NCCL's float32 does not."""
        return self._dtype != torch.float32 or comm.backend != "nccl"

    def begin(
        self, output: Tensor, gradients: Tensor, comm: Comm, spare: Tensor | None
    ) -> Collective:
        """Begin `sum`.

        Args:
            output: may be `gradients[rank]`.
            spare: memory like `gradients`, if it is needed; free again after the wait.
        """
        if spare is None or self._dtype == torch.float32:
            return comm.ireduce_scatter(output, gradients, spare)
        sent, received = spare.view(-1).view(self._dtype).view(2, *gradients.shape)
        sent.copy_(gradients)
        return SummedParts(comm.iall_to_all(received, sent), received, output)


class EightBit(Scatter):
    """Sends a byte for each value, by blocks, as the first stage of Int8."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size

    def sum(self, output: Tensor, gradients: Tensor, comm: Comm, layout: Layout) -> None:
        num_blocks = -(-gradients.shape[1] // self._block_size)
        shape = comm.size, num_blocks, int8.HEADER_BYTES + self._block_size
        byte = gradients.new_empty(0, dtype=torch.uint8)
        sent = layout.buffers["sent"].take(byte, *shape)
        received = layout.buffers["received"].take(byte, *shape)
        for values, records in zip(gradients, sent, strict=True):
            int8.encode(values, records)
        comm.all_to_all(received, sent)
        int8.decode(received[0], output)
        other = gradients[0]  # encoded, so its memory is free
        for records in received[1:]:
            int8.decode(records, other)
            output += other


class FourBit(Scatter):
    """Sends half a byte for each value, by blocks, with the residual of `exchange` if it has one.

    So delivered sums + residuals = true sums, as in the first stage of Int4.
    """

    def __init__(self, exchange: Int4) -> None:
        self._exchange = exchange

    def sum(self, output: Tensor, gradients: Tensor, comm: Comm, layout: Layout) -> None:
        block = self._exchange.block_size
        shape = comm.size, -(-gradients.shape[1] // block), int4.HEADER_BYTES + block // 2
        byte = gradients.new_empty(0, dtype=torch.uint8)
        sent = layout.buffers["sent"].take(byte, *shape)
        received = layout.buffers["received"].take(byte, *shape)
        residual = residual_of(self._exchange, gradients, layout)
        if residual is not None:
            gradients += residual
        other = torch.empty_like(output)
        for row, (values, records) in enumerate(zip(gradients, sent, strict=True)):
            int4.encode(values, records)
            if residual is not None:
                int4.decode(records, other)
                torch.sub(values, other, out=residual[row])
        comm.all_to_all(received, sent)
        int4.decode(received[0], output)
        for records in received[1:]:
            int4.decode(records, other)
            output += other


class SignBit(Scatter):
    """Sends a bit for each value and two scales for each block, with the residual of `exchange`.

    So delivered sums + residuals = true sums, as in the first stage of OneBit. Blocks run across
    parameters, since a unit's gradients are laid out so.
    """

    def __init__(self, exchange: OneBit) -> None:
        self._exchange = exchange

    def sum(self, output: Tensor, gradients: Tensor, comm: Comm, layout: Layout) -> None:
        block, (size, n) = self._exchange.block_size, gradients.shape
        blocks = -(-n // block)
        padded = layout.buffers["padded"].take(gradients, size, blocks * block)
        padded[:, :n].copy_(gradients)
        padded[:, n:].zero_()
        matrix = Matrix("", 0, size * blocks, block)
        values = matrix.view(padded.view(-1))
        residual = residual_of(self._exchange, padded, layout)

        def message(role: str) -> Message:
            return Message.within(layout.buffers[role], [matrix], size, size, padded)

        sent, received = message("sent"), message("received")
        flat = None if residual is None else residual.view_as(values)
        sent.encode([values], [flat], self._exchange.threshold)
        comm.all_to_all(received.bytes, sent.bytes)
        received.decode([values])  # rows of each rank's message, one rank after the other
        output.copy_(padded[0, :n])
        for other in padded[1:, :n]:
            output += other
        if residual is not None:
            residual[:, n:].zero_()  # of padding, which nobody saves


def residual_of(exchange: ErrorFeedback, gradients: Tensor, layout: Layout) -> Tensor | None:
    """Return the residual of `gradients` [N, n], of its shape; None without error feedback.

    The exchange holds views of it, by parameter: [N, rows, inner]. After a resume or a rollback it
    holds other tensors, which are copied; those of another number of ranks are laid out anew.
    """
    if not exchange.error_feedback:
        return None
    residual = layout.buffers["residual"].take(gradients, *gradients.shape)
    kept = exchange.residual
    views = {
        name: residual[:, at.start : at.stop].unflatten(1, (-1, at.inner))
        for name, at in layout.columns.items()
    }
    if all(name in kept and kept[name].data_ptr() == v.data_ptr() for name, v in views.items()):
        return residual
    residual.zero_()
    for name, view in views.items():
        if name in kept:
            fill_rows(view, kept[name])
        kept[name] = view
    return residual


def fill_rows(view: Tensor, saved: Tensor) -> None:
    """Copy the rows of a parameter, [N, rows, inner], to where another N or none puts them."""
    laid_out = torch.zeros_like(view, memory_format=torch.contiguous_format).flatten(0, 1)
    rows = saved.flatten(0, 1)[: len(laid_out)]  # what is cut off is padding
    laid_out[: len(rows)] = rows
    view.copy_(laid_out.view_as(view))


def scatter_of(exchange: Exchange) -> Scatter:
    """Return the first half of `exchange`.

    Raises:
        ValueError: it has none of its own.
    """
    if isinstance(exchange, AllReduce):
        return Exact(exchange.dtype)
    if isinstance(exchange, Int8):
        return EightBit(exchange.block_size)
    if isinstance(exchange, Int4):
        return FourBit(exchange)
    if isinstance(exchange, OneBit) and not exchange.warmup_steps:
        return SignBit(exchange)
    raise ValueError(
        f"exchange={type(exchange).__name__}: has no reduce-scatter; allowed are allreduce, bf16, "
        "fp16, int8, int4, and onebit without warmup_steps"
    )
