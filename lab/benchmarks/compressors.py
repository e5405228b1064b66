"""Codecs as lab.bench codec calls them: a matrix and its residual in, the matrix out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from lab.codec.int8 import reference as int8_reference
from lab.codec.onebit import codec as onebit
from lab.codec.onebit import reference as onebit_reference
from lab.codec.randomk import reference as randomk_reference
from lab.codec.signs import codec as signs
from lab.codec.signs import reference as signs_reference
from lab.codec.topk import reference as topk_reference
from lab.exchange.compressible import num_sent

BLOCK, TOPK_RATIO, RANDOMK_RATIO, RANK, SEED = 1024, 0.01, 0.3, 2, 0  # the exchanges' defaults


class Codec(ABC):
    """A codec under test. It keeps its message between encode and decode.

    Attributes:
        passes: float32 values that encode and decode read and write at least, for each value.
        feedback: decoded values plus new residual are gradient plus old residual.
        payload_bytes: bytes that a message sends.
    """

    passes = 3, 1
    feedback = True
    payload_bytes: int

    @abstractmethod
    def encode(self, gradient: Tensor, residual: Tensor) -> None:
        """Encode gradient + residual, float32 [rows, columns]; the error becomes the residual."""

    @abstractmethod
    def decode(self, out: Tensor) -> None:
        """Decode the message into `out`, or add it there."""

    def definition(self) -> Codec | None:
        """Return the codec that defines this one, with room for its own message; None: nothing."""
        return None

    def exact(self) -> list[Tensor]:
        """Return the parts of the message that must be the definition's to the bit, as bytes."""
        return []

    def near(self) -> list[Tensor]:
        """Return the parts of the message that must be the definition's up to rounding."""
        return []


class OneBitCodec(Codec):
    """The lab's 1-bit codec in one of its implementations."""

    passes = 3, 2

    def __init__(
        self, implementation: Any, threshold: str, rows: int, columns: int, device: torch.device
    ) -> None:
        self.implementation, self.threshold = implementation, threshold
        self.shape = rows, columns, device
        self.scales = torch.zeros(1, rows, 2, device=device)
        width = onebit.bit_bytes(columns)
        self.bits = torch.zeros(1, rows, width, dtype=torch.uint8, device=device)
        self.payload_bytes = self.scales.nbytes + self.bits.nbytes

    def encode(self, gradient: Tensor, residual: Tensor) -> None:
        self.implementation.encode(gradient, residual, self.threshold, self.scales, self.bits)

    def decode(self, out: Tensor) -> None:
        self.implementation.decode(self.scales, self.bits, out, add=True)

    def definition(self) -> Codec:
        return OneBitCodec(onebit_reference, self.threshold, *self.shape)

    def exact(self) -> list[Tensor]:
        return [self.bits]

    def near(self) -> list[Tensor]:
        return [self.scales]


class VectorCodec(Codec):
    """A codec of vectors in one of its implementations. Subclasses say which messages it fills.

    Plain torch may compute in the gradient's memory, so encode gets a copy, made once: after its
    first call the values mean nothing, but take as long.
    """

    reference: Any

    def __init__(self, implementation: Any, rows: int, columns: int, device: torch.device) -> None:
        self.implementation = implementation
        self.shape = rows, columns, device
        self.num_values = rows * columns
        self.message = self.make_message(device)
        self.payload_bytes = sum(part.nbytes for part in self.message)
        self._gradient: Tensor | None = None

    @abstractmethod
    def make_message(self, device: torch.device) -> list[Tensor]:
        """Return the parts of the message, unfilled."""

    def definition(self) -> Codec:
        return type(self)(self.reference, *self.shape)

    def own(self, gradient: Tensor) -> Tensor:
        """Return this codec's copy of the gradient: float32 [values]."""
        if self._gradient is None:
            self._gradient = gradient.flatten().clone()
        return self._gradient

    def exact(self) -> list[Tensor]:
        return [part.view(torch.uint8) for part in self.message if part.dim()]

    def near(self) -> list[Tensor]:
        return [part for part in self.message if not part.dim()]


class Int8Codec(VectorCodec):
    """ByteGrad's codec."""

    passes, feedback, reference = (1, 1), False, int8_reference

    def make_message(self, device: torch.device) -> list[Tensor]:
        shape = -(-self.num_values // BLOCK), int8_reference.HEADER_BYTES + BLOCK
        return [torch.zeros(shape, dtype=torch.uint8, device=device)]

    def encode(self, gradient: Tensor, residual: Tensor) -> None:
        self.implementation.encode(self.own(gradient), *self.message)

    def decode(self, out: Tensor) -> None:
        self.implementation.decode(*self.message, out.view(-1))

    def exact(self) -> list[Tensor]:
        return [self.message[0][:, int8_reference.HEADER_BYTES :]]

    def near(self) -> list[Tensor]:
        header = self.message[0][:, : int8_reference.HEADER_BYTES]
        return [header.contiguous().view(torch.float32)]


class SignsCodec(VectorCodec):
    """EF-SignSGD's codec, for one tensor."""

    reference = signs_reference

    def make_message(self, device: torch.device) -> list[Tensor]:
        size = signs.bit_bytes(self.num_values)
        return [
            torch.zeros((), device=device),
            torch.zeros(size, dtype=torch.uint8, device=device),
        ]

    def encode(self, gradient: Tensor, residual: Tensor) -> None:
        self.implementation.encode(self.own(gradient), residual.view(-1), *self.message)

    def decode(self, out: Tensor) -> None:
        magnitude, bits = self.message
        self.implementation.decode(magnitude[None], bits[None], out.view(-1))


class TopKCodec(VectorCodec):
    """The codec of top-k, for one tensor."""

    reference = topk_reference

    def make_message(self, device: torch.device) -> list[Tensor]:
        sent = num_sent((self.num_values,), TOPK_RATIO)
        return [torch.zeros(2, sent, dtype=torch.int32, device=device)]

    def encode(self, gradient: Tensor, residual: Tensor) -> None:
        indices, values = self.message[0]
        sent = indices, values.view(torch.float32)
        self.implementation.encode(gradient.view(-1), residual.view(-1), *sent, 0)

    def decode(self, out: Tensor) -> None:
        self.implementation.decode(self.message[0][None], out.view(-1))

    def exact(self) -> list[Tensor]:  # which of equal magnitudes are sent is not defined
        magnitudes = self.message[0][1].view(torch.float32).abs()
        return [magnitudes.sort().values.view(torch.uint8)]


class RandomKCodec(VectorCodec):
    """The codec of random-k, for one tensor."""

    reference = randomk_reference

    def make_message(self, device: torch.device) -> list[Tensor]:
        sent = num_sent((self.num_values,), RANDOMK_RATIO)
        return [torch.zeros(sent, device=device), torch.zeros((), device=device)]

    def encode(self, gradient: Tensor, residual: Tensor) -> None:
        flat = gradient.view(-1), residual.view(-1)
        self.implementation.encode(*flat, *self.message, SEED)

    def decode(self, out: Tensor) -> None:
        self.implementation.decode(self.message[0], out.view(-1), SEED)


class PowerSGDCodec(Codec):
    """PowerSGD's products on one rank, with the orthogonalisation between them."""

    def __init__(self, implementation: Any, rows: int, columns: int, device: torch.device) -> None:
        self.implementation = implementation
        self.p = torch.zeros(rows, RANK, device=device)
        generator = torch.Generator().manual_seed(SEED)
        self.warm = torch.randn(RANK, columns, generator=generator).to(device)
        self.q = torch.zeros_like(self.warm)
        self.payload_bytes = self.p.nbytes + self.q.nbytes

    def encode(self, gradient: Tensor, residual: Tensor) -> None:
        self.implementation.project(gradient, residual, self.warm, self.p)
        self.p = torch.linalg.qr(self.p).Q.contiguous()
        self.implementation.project_back(residual, self.p, self.q, True)

    def decode(self, out: Tensor) -> None:
        self.implementation.rebuild(self.p, self.q, out)


class CastCodec(Codec):
    """A cast to 16 bits, into memory that is kept as in AllReduce, or into fresh memory."""

    passes, feedback = (1, 1), False

    def __init__(
        self, dtype: torch.dtype, kept: bool, rows: int, columns: int, device: torch.device
    ) -> None:
        self.wire = torch.zeros(rows, columns, dtype=dtype, device=device)
        self.kept = kept
        self.payload_bytes = self.wire.nbytes

    def encode(self, gradient: Tensor, residual: Tensor) -> None:
        if self.kept:
            self.wire.copy_(gradient)
        else:
            self.wire = gradient.to(self.wire.dtype)

    def decode(self, out: Tensor) -> None:
        out.copy_(self.wire)

    def definition(self) -> Codec:
        rows, columns = self.wire.shape
        return CastCodec(self.wire.dtype, False, rows, columns, self.wire.device)

    def exact(self) -> list[Tensor]:
        return [self.wire.view(torch.uint8)]
