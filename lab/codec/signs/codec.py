"""One sign bit per value, and one magnitude for all: the codec of EF-SignSGD.

(Karimireddy et al., Error Feedback Fixes SignSGD, ICML 2019, Algorithm 1.)
"""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from lab.codec.native import fitting
from lab.codec.signs import native, reference


def bit_bytes(num_values: int) -> int:
    """Return the bytes of `num_values` packed signs."""
    return (num_values + 7) // 8


def encode(gradient: Tensor, residual: Tensor | None, magnitude: Tensor, bits: Tensor) -> None:
    """Encode gradient + residual as a magnitude and signs; the error becomes the new residual.

    Args:
        gradient: float32 [n], n > 0; may be overwritten, as plain torch uses its memory.
        residual: float32 [n], replaced. None: no error feedback.
        magnitude: float32 [], receives the mean magnitude, non-finite if a value is.
        bits: uint8 [bit_bytes(n)], receives the sign bits, 1 for negative values, least
            significant first.
    """
    implementation = _implementation(gradient, residual, magnitude, bits)
    implementation.encode(gradient, residual, magnitude, bits)


def decode(magnitudes: Tensor, bits: Tensor, out: Tensor) -> None:
    """Fill `out`, float32 [n], with the sum of several ranks' values, added in rank order.

    Args:
        magnitudes: float32 [ranks].
        bits: uint8 [ranks, bit_bytes(n)]; only its rows must be contiguous.
    """
    _implementation(magnitudes, bits[0], out).decode(magnitudes, bits, out)


def _implementation(*tensors: Tensor | None) -> native.Kernels | ModuleType:
    return fitting(native.kernels, *tensors) or reference
