"""Codec: what the values of a bucket become on the wire, and back."""

from __future__ import annotations

import ctypes
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from lab.codec.kernels import Messages, Peers, Reading, Residual, bound, library, on_gpu
from lab.codec.layout import FLOAT_BYTES, MessageLayout, Piece, RowBytes, Rows, lay_out
from lab.settings.own_code import is_labs

MANY = 2**20  # values, of which a header is a small part
DEFINING = ("rows", "row_of", "row_bytes", "write", "read")  # what kernels take as the lab has it
Shapes = Mapping[str, Sequence[int]]


class Codec(ABC):
    """A way to write rows of float32 values as bytes: for each row a header and a payload.

    `row_bytes`, `write` and `read` define it, in plain torch on any device. Of the lab's codecs,
    C++ kernels of the same name (cpp/NAME.cpp) take their place on CPUs, and give the same bytes. A
    row with a value that is not finite must be read as values that are not. Constructors raise
    ValueError for an argument out of range.

    Attributes:
        name: of its kernels; a user's codec has none.
        option: a number that these are given.
        block_size: values of a row that is divided regardless of parameters; 0: rows may have any
            length, and one may be cut into several, each with a header of its own.
        reading: how GPUs' kernels read a value; None: there are none for this codec.
    """

    name: ClassVar[str] = ""
    option = 0
    block_size = 0
    reading: Reading | None = None

    def rows(self, shapes: Shapes) -> Iterator[Rows]:
        """Yield the rows of a bucket of parameters, in their order; others travel as they are.

        Unless a codec says otherwise, they run across parameters.
        """
        if num_values := sum(map(math.prod, shapes.values())):
            yield self.row_of(num_values)

    def row_of(self, num_values: int) -> Rows:
        """Return the rows of values that are divided regardless of parameters; none is left out."""
        return Rows(0, num_values, self.block_size or num_values)

    @abstractmethod
    def row_bytes(self, columns: int) -> RowBytes:
        """Return the bytes of a row of `columns` values."""

    @abstractmethod
    def write(self, values: Tensor, header: Tensor, payload: Tensor) -> None:
        """Encode rows.

        Args:
            values: float32 [rows, columns].
            header, payload: uint8 [rows, bytes of each row].
        """

    @abstractmethod
    def read(self, header: Tensor, payload: Tensor, columns: int) -> Tensor:
        """Return the values of encoded rows, float32 [rows, columns]. Arguments: see `write`."""

    def also_moved(self, layout: MessageLayout) -> float:
        """Return the bytes of memory that encoding moves besides a pass over all that it takes."""
        return 0.0

    def bytes_per_value(self) -> float:
        """Return the bytes of a message for each value, of rows of usual length."""
        columns = self.row_of(MANY).columns
        return sum(self.row_bytes(columns)) / columns

    def layout(self, shapes: Shapes, num_values: int, parts: int) -> MessageLayout:
        """Lay out a bucket of parameters for messages of `parts` lines."""
        rows = [Rows(*each) for each in self.rows(shapes)]
        self._require_rows(rows, num_values)
        return lay_out(rows, num_values, parts, self.row_bytes, cuts_rows=not self.block_size)

    def _require_rows(self, rows: Sequence[Rows], num_values: int) -> None:
        """Refuse rows of a user's codec that no layout has: they would be sent twice, or never."""
        end = 0
        for each in rows:
            start, stop, columns = each
            if not end <= start < stop <= num_values or columns < 1:
                raise ValueError(
                    f"codec={type(self).__qualname__}: rows yields {(*each,)} after value {end}; "
                    "must yield Rows(start, stop, columns) in their order, without overlap, each "
                    f"of 1 or more of the {num_values} values, in rows of 1 or more columns"
                )
            end = stop

    def layout_of_parts(self, num_values: int, parts: int) -> MessageLayout:
        """Lay out a bucket whose parts are given: `num_values` each."""
        rows = [self.row_of(num_values)] if num_values else []
        one = lay_out(rows, num_values, 1, self.row_bytes, cuts_rows=not self.block_size)
        return one.repeated(parts, num_values)

    def kernels(self, device: torch.device) -> Reference:
        """Return the fastest kernels for tensors of `device`."""
        if not is_labs(type(self), *DEFINING):
            return Reference(self)  # perhaps a subclass of one that has kernels
        if device.type != "cpu":
            return (on_gpu(self.reading, device) if self.reading else None) or Reference(self)
        found = library(self.name)
        return Reference(self) if found is None else Native(self, found)


class Reference:
    """The kernels of a codec in plain torch: row after row as its definition says.

    They move values into messages and back. `values` and `out` are float32 [values of the layout],
    a `message` is uint8 [layout.num_bytes], `messages` are uint8 [number, layout.num_bytes].
    """

    def __init__(self, codec: Codec) -> None:
        self._codec = codec

    def encode(
        self,
        layout: MessageLayout,
        values: Tensor,
        residual: Residual,
        message: Tensor,
        finite: Tensor | None = None,
    ) -> None:
        """Fill `message` with values + residual; what it leaves out becomes the new residual.

        Args:
            finite: bool [], becomes True, as `add_up` takes it: on a GPU no launch for itself.
        """
        if finite is not None:
            finite.fill_(True)
        for piece in layout.pieces:
            self._encode(piece, _rows(piece, values), residual, message)
        for start, count, at in layout.copies:
            _floats(message, at, count).copy_(values[start : start + count])

    def add_up(
        self, layout: MessageLayout, messages: Tensor, out: Tensor, divisor: int, finite: Tensor
    ) -> None:
        """Fill `out` with the sum of messages, in their order, over `divisor`.

        Args:
            finite: bool [], True, becomes False if one of the values is not.
        """
        for piece in layout.pieces:
            torch.div(self._sum(piece, messages), divisor, out=_rows(piece, out))
        for start, count, at in layout.copies:
            own = out[start : start + count]
            torch.div(_sum_of_floats(messages, at, count), divisor, out=own)
        finite.copy_(out.isfinite().all())

    def reduce(
        self, layout: MessageLayout, messages: Messages, residual: Residual, out: Messages
    ) -> None:
        """Fill the message `out` with the sum of messages, in their order, + residual.

        Args:
            out: Peers: each receives it. They must not overlap `messages`.
        """
        first = out[0] if isinstance(out, Peers) else out
        for piece in layout.pieces:
            self._encode(piece, self._sum(piece, messages), residual, first)
        for _, count, at in layout.copies:
            _floats(first, at, count).copy_(_sum_of_floats(messages, at, count))
        push(out)

    def _encode(self, piece: Piece, rows: Tensor, residual: Residual, message: Tensor) -> None:
        written = self._parts(piece, message)
        if residual is None:
            self._codec.write(rows, *written)
            return
        kept = _rows(piece, residual)
        rows = rows + kept
        self._codec.write(rows, *written)
        torch.sub(rows, self._codec.read(*written, piece.columns), out=kept)

    def _sum(self, piece: Piece, messages: Messages) -> Tensor:
        total = self._codec.read(*self._parts(piece, messages[0]), piece.columns)
        for message in messages[1:]:
            total += self._codec.read(*self._parts(piece, message), piece.columns)
        return total

    def _parts(self, piece: Piece, message: Tensor) -> tuple[Tensor, Tensor]:
        header, payload = self._codec.row_bytes(piece.columns)
        return (
            message[piece.header :][: piece.rows * header].view(piece.rows, header),
            message[piece.payload :][: piece.rows * payload].view(piece.rows, payload),
        )


class Native(Reference):
    """The same in C++. Python's lock is released while a kernel runs."""

    def __init__(self, codec: Codec, found: ctypes.CDLL) -> None:
        super().__init__(codec)
        self._option = codec.option
        self._encode_rows = bound(found, f"{codec.name}_encode", tensors=5, numbers=5)
        self._add_rows = bound(found, f"{codec.name}_add_up", tensors=5, numbers=8)
        self._reduce_rows = bound(found, f"{codec.name}_reduce", tensors=5, numbers=7)

    def encode(
        self,
        layout: MessageLayout,
        values: Tensor,
        residual: Residual,
        message: Tensor,
        finite: Tensor | None = None,
    ) -> None:
        kept = None if residual is None else residual.data_ptr()
        self._encode_rows(
            *(values.data_ptr(), kept, message.data_ptr(), *layout.addresses),
            *(self._option, torch.get_num_threads()),
        )

    def add_up(
        self, layout: MessageLayout, messages: Tensor, out: Tensor, divisor: int, finite: Tensor
    ) -> None:
        self._add_rows(
            *(messages.data_ptr(), out.data_ptr(), finite.data_ptr(), *layout.addresses),
            *(messages.shape[0], messages.stride(0), divisor),
            *(self._option, torch.get_num_threads()),
        )

    def reduce(
        self, layout: MessageLayout, messages: Messages, residual: Residual, out: Messages
    ) -> None:
        kept = None if residual is None else residual.data_ptr()
        rows, first = together(messages), out[0] if isinstance(out, Peers) else out
        self._reduce_rows(
            *(rows.data_ptr(), kept, first.data_ptr(), *layout.addresses),
            *(rows.shape[0], rows.stride(0), self._option, torch.get_num_threads()),
        )
        push(out)


def together(messages: Messages) -> Tensor:
    """Return messages one behind the other, [messages, bytes]; a copy of those that lie apart."""
    return torch.stack(messages) if isinstance(messages, Peers) else messages


def push(messages: Messages) -> None:
    """Copy the first of several messages to all others."""
    if isinstance(messages, Peers) and len(messages) > 1:
        first, *others = messages
        torch._foreach_copy_(others, [first] * len(others))


def _rows(piece: Piece, values: Tensor) -> Tensor:
    return values[piece.start : piece.stop].view(piece.rows, piece.columns)


def _floats(message: Tensor, at: int, count: int) -> Tensor:
    return message[at : at + count * FLOAT_BYTES].view(torch.float32)


def _sum_of_floats(messages: Messages, at: int, count: int) -> Tensor:
    total = _floats(messages[0], at, count).clone()
    for message in messages[1:]:
        total += _floats(message, at, count)
    return total
