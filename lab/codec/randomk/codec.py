"""Random values, at places that all ranks draw alike: the codec of random-k.

One value is drawn from each of k equal ranges of a tensor: without replacement, in k operations
instead of a permutation's n, and with equal probability for all values if k divides n.
"""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from lab.codec.native import fitting
from lab.codec.randomk import native, reference


def encode(
    gradient: Tensor, residual: Tensor | None, values: Tensor, probe: Tensor, seed: int
) -> None:
    """Take k random values out of gradient + residual; the rest stays there.

    Args:
        gradient: float32 [n], n < 2**31.
        residual: float32 [n], replaced by what is not taken. None: no error feedback.
        values: float32 [k], k <= n, receives what is taken.
        probe: float32 [], becomes NaN if any of the n values is not finite, which the drawn values
            alone need not show.
        seed: from 0 to 2**63 - 1; the same one draws the same places on every device.
    """
    implementation = _implementation(gradient, residual, values, probe)
    implementation.encode(gradient, residual, values, probe, seed)


def decode(values: Tensor, out: Tensor, seed: int) -> None:
    """Put `values` at the places in `out`, float32 [n], that `seed` draws, and zeros elsewhere."""
    _implementation(values, out).decode(values, out, seed)


def _implementation(*tensors: Tensor | None) -> native.Kernels | ModuleType:
    return fitting(native.kernels, *tensors) or reference
