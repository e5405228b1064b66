"""Codecs as lab.bench codec calls them: a matrix and its residual in, the matrix out.

Some are 1-bit codecs in eager torch, as other systems write them: baselines for the lab's kernels.
They are written anew from the formulas. They keep the properties that make the originals slow
(full-size temporaries, a pass per operation, scalars that the host reads), and treat the whole
tensor at once, with one pair of reconstruction values or one scale.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lab.codec.base import Codec as RowCodec
from lab.codec.base import Reference
from lab.codec.codecs import Int4, Int8, OneBit, Signs, TopK
from lab.codec.layout import Draws, Factors
from lab.codec.trial import require_sound
from lab.exchange import powersgd, randomk
from lab.exchange.layout import num_sent
from lab.settings.errors import ConfigError, as_config_error
from lab.settings.own_code import callable_at, check_arguments, names_code

RANDOMK_RATIO, RANK = 0.3, 2  # the exchanges' defaults
NUM_MESSAGES = 8  # that a reduction adds up, each of a share of the rows, as on so many ranks
IN_TORCH = "_reference"  # ends the name of a codec's definition in plain torch


class Compressor(ABC):
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

    def reduction(self) -> tuple[Callable[[], None], int] | None:
        """Return what adds up messages and encodes their sum, and the bytes that it moves at least.

        None: no exchange needs that of this codec.
        """
        return None

    def parts(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the parts of the message that must be the definition's.

        Returns:
            Those that must be so to the bit, as bytes, and those that must be up to rounding.
        """
        return [], []


class LabCompressor(Compressor):
    """A codec of the lab, by its fastest kernels or by its definition, for one matrix.

    Args:
        in_torch: by its definition, in plain torch.
        feedback: with error feedback.
    """

    def __init__(
        self,
        codec: RowCodec,
        in_torch: bool,
        rows: int,
        columns: int,
        device: torch.device,
        feedback: bool = True,
    ) -> None:
        self.codec, self.shape, self.feedback = codec, (rows, columns, device), feedback
        self.passes = (3, 1) if feedback else (1, 1)
        self.layout = codec.layout({"matrix": (rows, columns)}, rows * columns, 1)
        self.kernels = Reference(codec) if in_torch else codec.kernels(device)
        self.message = torch.zeros(self.layout.num_bytes, dtype=torch.uint8, device=device)
        self.finite = torch.ones((), dtype=torch.bool, device=device)
        self.payload_bytes = len(self.message)

    def encode(self, gradient: Tensor, residual: Tensor) -> None:
        kept = residual.view(-1) if self.feedback else None
        self.kernels.encode(self.layout, gradient.view(-1), kept, self.message)

    def decode(self, out: Tensor) -> None:
        self.kernels.add_up(self.layout, self.message[None], out.view(-1), 1, self.finite)

    def reduction(self) -> tuple[Callable[[], None], int]:
        rows, columns, device = self.shape
        share = max(1, rows // NUM_MESSAGES), columns
        values = torch.randn(share, device=device).view(-1)
        layout = self.codec.layout({"matrix": share}, len(values), 1)
        messages = self.message.new_zeros(NUM_MESSAGES, layout.num_bytes)
        for message in messages:
            self.kernels.encode(layout, values, None, message)
        kept = torch.zeros_like(values) if self.feedback else None
        out = torch.empty_like(messages[0])
        moved = messages.nbytes + out.nbytes + (0 if kept is None else 2 * kept.nbytes)
        return partial(self.kernels.reduce, layout, messages, kept, out), moved

    def parts(self) -> tuple[list[Tensor], list[Tensor]]:
        payloads, headers = [], []
        for piece in self.layout.pieces:
            header, payload = (piece.rows * size for size in self.codec.row_bytes(piece.columns))
            payloads.append(self.message[piece.payload :][:payload])
            headers.append(self.message[piece.header :][:header].view(torch.float32))
        return payloads, headers


class TopKMessages(LabCompressor):
    """Top-k: which of equal magnitudes are sent is not defined."""

    def parts(self) -> tuple[list[Tensor], list[Tensor]]:
        payloads, headers = super().parts()
        values = (payload.view(torch.float32).chunk(2)[1] for payload in payloads)
        return [each.abs().sort().values.view(torch.uint8) for each in values], headers


class RandomKCodec(Compressor):
    """The codec of random-k, for one tensor."""

    def __init__(self, in_torch: bool, rows: int, columns: int, device: torch.device) -> None:
        self.kernels = randomk.RandomKReference() if in_torch else randomk.kernels(device)
        sent = num_sent((rows * columns,), RANDOMK_RATIO)
        self.draws = Draws([rows * columns], [sent], [0])
        self.values, self.probe = torch.zeros(sent, device=device), torch.zeros((), device=device)
        self.payload_bytes = self.values.nbytes + self.probe.nbytes

    def encode(self, gradient: Tensor, residual: Tensor) -> None:
        flat = gradient.view(-1), residual.view(-1)
        self.kernels.encode(self.draws, *flat, self.values, self.probe)

    def decode(self, out: Tensor) -> None:
        self.kernels.decode(self.draws, self.values, out.view(-1), 1)

    def parts(self) -> tuple[list[Tensor], list[Tensor]]:
        return [self.values.view(torch.uint8)], [self.probe]


class PowerSGDCodec(Compressor):
    """PowerSGD's products on one rank, with the orthogonalisation between them."""

    def __init__(self, in_torch: bool, rows: int, columns: int, device: torch.device) -> None:
        self.kernels = (
            powersgd.LowRankReference() if in_torch else powersgd.factor_kernels(device, RANK)
        )
        self.factors = Factors([(0, rows, columns, RANK)])
        self.p = torch.zeros(rows, RANK, device=device)
        generator = torch.Generator().manual_seed(0)
        self.warm = torch.randn(RANK, columns, generator=generator).to(device)
        self.q = torch.zeros_like(self.warm)
        self.payload_bytes = self.p.nbytes + self.q.nbytes

    def encode(self, gradient: Tensor, residual: Tensor) -> None:
        self.kernels.project(self.factors, gradient, residual, self.warm, self.p)
        powersgd.orthonormalise([self.p])
        self.kernels.project_back(self.factors, residual, self.p, self.q, True)

    def decode(self, out: Tensor) -> None:
        self.kernels.rebuild(self.factors, self.p, self.q, out)


class CastCodec(Compressor):
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

    def parts(self) -> tuple[list[Tensor], list[Tensor]]:
        return [self.wire.view(torch.uint8)], []


class GraceLike(Compressor):
    """GRACE's `onebit` with its residual memory (H. Xu et al., ICDCS 2021; grace_dl, torch).

    The sign of each value travels as one uint8, with the means of both sides. (GRACE's decoder for
    plain torch.distributed takes `~` of a uint8 mask, which is not the complement; this one follows
    its decoder for Horovod, which converts to bool first.)
    """

    passes = 3, 2

    def __init__(self, rows: int, columns: int, device: torch.device) -> None:
        self.payload_bytes = rows * columns + 8

    def encode(self, gradient: Tensor, residual: Tensor) -> None:
        values = 1.0 * residual + 1.0 * gradient  # GRACE's beta and gamma
        lower = values < 0
        self.low = _mean_of(values, lower)
        self.high = _mean_of(values, ~lower)
        self.mask = lower.to(torch.uint8)
        residual.copy_(values - self._values())

    def decode(self, out: Tensor) -> None:
        out += self._values()

    def _values(self) -> Tensor:
        lower = self.mask.bool()
        return lower * self.low + ~lower * self.high


def _mean_of(values: Tensor, chosen: Tensor) -> Tensor:
    total, count = values[chosen].sum(), chosen.sum().float()
    return total / count if count > 0 else total  # the host waits for the device here


class DeepSpeedLike(Compressor):
    """The compression of DeepSpeed's 1-bit Adam (H. Tang et al., ICML 2021), one worker's part.

    Signs, 0 counted as +, times one scale for the whole tensor: its root mean square. Signs are
    packed eight to a byte, and unpacked to float32.
    """

    passes = 3, 2

    def __init__(self, rows: int, columns: int, device: torch.device) -> None:
        self.payload_bytes = -(-rows * columns // 8) + 4
        self.weights = 2 ** torch.arange(8, dtype=torch.uint8, device=device)

    def encode(self, gradient: Tensor, residual: Tensor) -> None:
        values = (gradient + residual).view(-1)
        self.scale = torch.linalg.vector_norm(values) / values.numel() ** 0.5
        signs = values.sign().add_(1).bool().float().add_(-0.5).mul_(2.0)
        residual.view(-1).copy_(values - self.scale * signs)
        flags = F.pad((signs > 0).to(torch.uint8), (0, -signs.numel() % 8)).view(-1, 8)
        self.packed = (flags * self.weights).sum(dim=1, dtype=torch.uint8)

    def decode(self, out: Tensor) -> None:
        flags = self.packed.unsqueeze(1).bitwise_and(self.weights).ne(0).float().view(-1)
        signs = flags[: out.numel()].add_(-0.5).mul_(2.0)
        out.view(-1).add_(signs * self.scale)


Make = Callable[[int, int, torch.device], Compressor]  # of rows, columns and device


def _both(
    name: str, make: Callable[..., Compressor], codec: Any, reference: Any
) -> dict[str, Make]:
    return {name: partial(make, codec), name + IN_TORCH: partial(make, reference)}


def _messages(
    name: str, codec: RowCodec, make: type[LabCompressor] = LabCompressor, **settings: bool
) -> dict[str, Make]:
    return _both(name, partial(make, codec, **settings), False, True)


# A new codec is one line here.
CODECS: dict[str, Make] = {
    **_messages("onebit", OneBit()),
    **_messages("onebit_mean", OneBit("mean")),
    "grace_like": GraceLike,
    "deepspeed_like": DeepSpeedLike,
    **_messages("int8", Int8(1024), feedback=False),
    **_messages("int4", Int4(128), feedback=False),
    **_messages("signs", Signs(1)),
    **_messages("topk", TopK(), TopKMessages),
    **_both("randomk", RandomKCodec, False, True),
    **_both("powersgd", PowerSGDCodec, False, True),
    **_both("bf16", partial(CastCodec, torch.bfloat16), True, False),
    **_both("fp16", partial(CastCodec, torch.float16), True, False),
}


def maker(name: str) -> Make:
    """Return what makes a codec: one of CODECS, or a user's own, with the defaults of its class.

    Raises:
        ConfigError: there is no such codec, or it breaks a rule of codecs.
    """
    if name in CODECS:
        return CODECS[name]
    if not names_code(name):
        allowed = ", ".join(CODECS)
        raise ConfigError(f"codec={name}: no such codec; allowed: {allowed}, or a path to your own")
    kind = callable_at(name, f"codec={name}")
    check_arguments(kind, (), (), "codec")
    codec = kind()
    with as_config_error():
        require_sound(codec, keeps=False)
    return partial(LabCompressor, codec, False)


def definition_of(name: str) -> Make | None:
    """Return what makes the codec that defines one in plain torch; None: none does.

    PowerSGD's products have another order of sums in each kernel.
    """
    return None if name == "powersgd" else CODECS.get(name + IN_TORCH)
