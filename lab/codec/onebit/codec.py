"""One bit per value and two reconstruction values per row: the codec of 1-bit SGD.

lab.codec.onebit.reference defines it. The C++ (native.py) and Triton (triton_codec.py) kernels
compute the same at memory bandwidth: they read gradient and residual and write the new residual and
the bits, without temporaries of the gradient's size. Each call takes a whole matrix, whose rows may
belong to the lines of a message, one line for each rank (lab.codec.onebit.message).
"""

from __future__ import annotations

import functools
import importlib
from itertools import product
from types import ModuleType

import torch
from torch import Tensor

from lab.codec import build
from lab.codec.native import fitting
from lab.codec.onebit import native, reference

THRESHOLDS = ("zero", "mean")
SCALE_BYTES = 8  # two float32 reconstruction values for each row


def bit_bytes(columns: int) -> int:
    """Return the bytes of one row of `columns` packed bits."""
    return (columns + 7) // 8


def encode(
    gradient: Tensor, residual: Tensor | None, threshold: str, scales: Tensor, bits: Tensor
) -> None:
    """Quantise every row of gradient + residual; the error becomes the new residual.

    `threshold="zero"` splits at 0 and reconstructs each side by its mean; `"mean"` splits at the
    row's mean m and reconstructs m - d and m + d, with d the mean absolute deviation. A row with a
    non-finite value gets a non-finite scale.

    Args:
        gradient: float32 [rows, columns].
        residual: float32 [rows, columns], replaced. None: no error feedback.
        threshold: one of THRESHOLDS.
        scales: float32 [lines, height, 2], receives the values of bit 0 and bit 1. Row r goes to
            line r // height, so lines * height >= rows; places without a row are left alone.
        bits: uint8 [lines, height, bit_bytes(columns)], receives the bits, least significant first.
    """
    implementation = _implementation(gradient, residual, scales[0], bits[0])
    implementation.encode(gradient, residual, threshold, scales, bits)


def decode(scales: Tensor, bits: Tensor, out: Tensor, add: bool = False) -> None:
    """Reconstruct values into `out`, float32 [rows, columns], or add them there.

    Args:
        scales, bits: filled by `encode`.
    """
    _implementation(out, scales[0], bits[0]).decode(scales, bits, out, add)


def reduce(
    scales: Tensor,
    bits: Tensor,
    total: Tensor,
    residual: Tensor | None,
    threshold: str,
    out_scales: Tensor,
    out_bits: Tensor,
) -> None:
    """Decode the messages of several ranks, sum them in rank order, and encode the sum.

    Args:
        scales, bits: each rank's: float32 [ranks, rows, 2], uint8 [ranks, rows, bytes]. total:
        float32 [rows, columns], scratch memory for the sum.
        residual, threshold: as in `encode`.
        out_scales, out_bits: [rows, 2] and [rows, bytes], receive the encoded sum.
    """
    implementation = _implementation(total, residual, scales[0], bits[0], out_scales, out_bits)
    implementation.reduce(scales, bits, total, residual, threshold, out_scales, out_bits)


def _implementation(*tensors: Tensor | None) -> native.Kernels | ModuleType:
    """Return the fastest implementation for `tensors`, which are all on one device."""
    if fast := fitting(native.kernels, *tensors):
        return fast
    present = [tensor for tensor in tensors if tensor is not None]
    if present[0].is_cpu or not all(tensor.is_contiguous() for tensor in present):
        return reference
    return triton_kernels(present[0].device) or reference


@functools.cache
def triton_kernels(device: torch.device) -> ModuleType | None:
    """Return Triton's kernels if they run on `device`; otherwise warn and return None.

    Triton compiles at a kernel's first launch, for which it needs a C compiler and Python's
    headers, and it supports only some GPUs and drivers: so only a trial shows whether it works.

    Raises:
        torch.OutOfMemoryError: the trial does not fit; not a fault of Triton's.
    """
    try:
        kernels = importlib.import_module("lab.codec.onebit.triton_codec")
        for threshold, columns in product(THRESHOLDS, (16, kernels.LONGEST)):
            _try(kernels, threshold, columns, device)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # compilers and drivers raise many types
        lines = str(error).splitlines()
        line = next((line for line in lines if line.strip()), "no reason given")
        name = type(error).__name__
        build.warn_slow(f"1-bit codec: Triton does not work on {device} ({name}: {line.strip()})")
        return None
    return kernels


def _try(kernels: ModuleType, threshold: str, columns: int, device: torch.device) -> None:
    """Launch each kernel once, on a row of zeros."""
    values, scales = torch.zeros(1, columns, device=device), torch.zeros(1, 1, 2, device=device)
    bits = torch.zeros(1, 1, bit_bytes(columns), dtype=torch.uint8, device=device)
    kernels.encode(values, values.clone(), threshold, scales, bits)
    kernels.reduce(scales, bits, values, None, threshold, scales[0], bits[0])
    kernels.decode(scales, bits, values, True)
