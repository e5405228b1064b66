"""One bit per value and two reconstruction values per row: the codec of 1-bit SGD.

Defined in lab.codec.reference. What is compiled here does the same at the memory's speed: one pass
that reads gradient and residual and leaves the new residual and the bits.
"""

from __future__ import annotations

from torch import Tensor

from lab.codec import native, reference

THRESHOLDS = ("zero", "mean")
SCALE_BYTES = 8  # two float32 reconstruction values for each row


def bit_bytes(columns: int) -> int:
    """Bytes that the packed bits of one row of `columns` values take."""
    return (columns + 7) // 8


def encode(
    gradient: Tensor, residual: Tensor | None, threshold: str, scales: Tensor, bits: Tensor
) -> None:
    """Quantise every row of gradient + residual, and keep what that loses as the new residual.

    `threshold="zero"` splits at 0 and reconstructs each side by its mean; `"mean"` splits at the
    row's mean m and reconstructs m - d and m + d, with d the mean absolute deviation. A row that
    holds a value that is not finite gets a scale that is not finite.

    Args:
        gradient: float32 [rows, columns].
        residual: float32 [rows, columns], replaced. None: nothing is carried over.
        threshold: one of THRESHOLDS.
        scales: float32 [rows, 2], receives what bit 0 and bit 1 stand for.
        bits: uint8 [rows, bit_bytes(columns)], receives the bits, least significant first.
    """
    kernel = native.kernels(gradient, residual, scales, bits)
    (kernel or reference).encode(gradient, residual, threshold, scales, bits)


def decode(scales: Tensor, bits: Tensor, out: Tensor, add: bool = False) -> None:
    """Put into `out`, float32 [rows, columns], what scales and bits stand for, or add it there."""
    (native.kernels(scales, bits, out) or reference).decode(scales, bits, out, add)
