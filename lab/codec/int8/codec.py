"""Eight bits per value between the smallest and the largest of its block: ByteGrad's codec.

A record encodes one block: its smallest value and the step between two levels, both float32, then
a byte for each value (as Bagua's MinMaxUInt8, which sends the largest value instead of the step).
Values are rounded to the nearest level, halves upwards, so a finite value is off by at most half a
step, and a block of equal values is exact. A block with a non-finite value decodes to non-finite
values only.
"""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from lab.codec.int8 import native, reference
from lab.codec.native import fitting

HEADER_BYTES, LEVELS = reference.HEADER_BYTES, reference.LEVELS


def encode(values: Tensor, records: Tensor) -> None:
    """Write `values` to the first of `records`.

    Args:
        values: float32 [n]; may be overwritten, as plain torch computes levels in their memory.
        records: uint8 [at least ceil(n / block), HEADER_BYTES + block].
    """
    _implementation(values, records).encode(values, records)


def decode(records: Tensor, out: Tensor) -> None:
    """Fill `out`, float32 [n], from the first of `records`."""
    _implementation(records, out).decode(records, out)


def encode_mean(records: Tensor, mean: Tensor, out: Tensor) -> None:
    """Decode several ranks' records, add them in rank order and encode the mean.

    Args:
        records: uint8 [ranks, at least ceil(n / block), HEADER_BYTES + block].
        mean: float32 [n], scratch memory.
        out: as one rank's `records`, receives the mean.
    """
    _implementation(records, mean, out).encode_mean(records, mean, out)


def _implementation(*tensors: Tensor) -> native.Kernels | ModuleType:
    return fitting(native.kernels, *tensors) or reference
