"""The values of largest magnitude, each with its index: the codec of top-k."""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from lab.codec.native import fitting
from lab.codec.topk import native, reference


def encode(
    gradient: Tensor, residual: Tensor | None, indices: Tensor, values: Tensor, offset: int
) -> None:
    """Take the values of largest magnitude out of gradient + residual; the rest stays there.

    NaN is the largest of all. Of equal magnitudes, which are taken is not defined.

    Args:
        gradient: float32 [n].
        residual: float32 [n], replaced by what is not taken. None: no error feedback.
        indices, values: int32 and float32 [k], k <= n, receive what is taken, by ascending index.
        offset: added to indices.
    """
    implementation = _implementation(gradient, residual, indices, values)
    implementation.encode(gradient, residual, indices, values, offset)


def decode(messages: Tensor, out: Tensor) -> None:
    """Fill `out`, float32 [n], with the mean of several ranks' messages, added in rank order.

    Args:
        messages: int32 [ranks, 2, k], each rank's indices, then its values, bit by bit.
    """
    _implementation(messages, out).decode(messages, out)


def _implementation(*tensors: Tensor | None) -> native.Kernels | ModuleType:
    return fitting(native.kernels, *tensors) or reference
