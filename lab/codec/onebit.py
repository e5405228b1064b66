"""One bit per value and two reconstruction values per row: the codec of 1-bit SGD.

Defined in lab.codec.reference. Its twins, in C++ for CPUs (native.py) and Triton for GPUs (gpu.py),
do the same at the memory's speed: what they read is gradient and residual, what they write is the
new residual and the bits, and nothing of the gradient's size lies in between.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from types import ModuleType

import torch
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
    twin = _twin(gradient, gradient if residual is None else residual, scales, bits)
    twin.encode(gradient, residual, threshold, scales, bits)


def decode(scales: Tensor, bits: Tensor, out: Tensor, add: bool = False) -> None:
    """Put into `out`, float32 [rows, columns], what scales and bits stand for, or add it there."""
    _twin(scales, bits, out).decode(scales, bits, out, add)


def reduce(
    scales: Tensor,
    bits: Tensor,
    total: Tensor,
    residual: Tensor | None,
    threshold: str,
    out_scales: Tensor,
    out_bits: Tensor,
) -> None:
    """Encode the sum, in rank order, of what several ranks have encoded.

    Args:
        scales, bits: as in `encode`, of each rank: [ranks, rows, ...], with as many bytes from one
            rank's to the next one's.
        total: float32 [rows, columns], memory that the sum may be written to.
        residual, threshold: as in `encode`.
        out_scales, out_bits: receive what stands for the sum.
    """
    twin = _twin(*scales, *bits, total if residual is None else residual, out_scales, out_bits)
    if isinstance(twin, native.Kernels):
        columns = total.shape[1]
        twin.reduce(scales, bits, columns, residual, threshold, out_scales, out_bits)
        return
    for rank, (of_scales, of_bits) in enumerate(zip(scales, bits, strict=True)):
        twin.decode(of_scales, of_bits, total, add=rank > 0)
    twin.encode(total, residual, threshold, out_scales, out_bits)


def _twin(*tensors: Tensor) -> native.Kernels | ModuleType:
    """The fastest of the three that can work on `tensors`."""
    if not all(tensor.is_contiguous() for tensor in tensors):
        return reference
    if tensors[0].device.type == "cpu":
        return native.build(torch.backends.cpu.get_cpu_capability()) or reference
    return _triton_twin() or reference


@functools.cache
def _triton_twin() -> ModuleType | None:
    try:
        return importlib.import_module("lab.codec.gpu")  # Triton comes with torch for CUDA alone
    except ImportError:
        warnings.warn(
            "1-bit codec: no triton; plain torch is used, which is many times slower", stacklevel=1
        )
        return None
