"""One bit per value, its sign, and one magnitude for all of them: the codec of EF-SignSGD."""

from __future__ import annotations

import torch
from torch import Tensor

# Eight bytes that are 0 or 1, as one number times this, have their bits in its highest byte, the
# first lowest.
GATHER_BITS = 0x0102040810204080
CHUNK_BYTES = 2**16


def bit_bytes(num_values: int) -> int:
    """Bytes that the packed signs of `num_values` values take."""
    return (num_values + 7) // 8


def encode(values: Tensor) -> tuple[Tensor, Tensor]:
    """Magnitude and signs that stand for `values`, float32 [n].

    Returns:
        The mean magnitude, float32 [], not finite where a value is not; and the sign bits, 1 for
        negative values, least significant first, uint8 [bit_bytes(n)].
    """
    flags = torch.zeros(8 * bit_bytes(len(values)), dtype=torch.bool, device=values.device)
    torch.signbit(values, out=flags[: len(values)])
    packed = flags.view(torch.int64).mul_(GATHER_BITS).view(torch.uint8)[7::8]
    return torch.linalg.vector_norm(values, 1) / len(values), packed


def decode_add(magnitude: Tensor, bits: Tensor, out: Tensor) -> None:
    """Add to `out`, float32 [n], what magnitude and bits stand for."""
    bytes_, places = torch.arange(256, device=out.device), torch.arange(8, device=out.device)
    signs = 1 - 2 * (bytes_.unsqueeze(1) >> places & 1)
    values_of_byte = signs * magnitude
    decoded = out.new_empty(CHUNK_BYTES, 8)  # in the cache, where new memory would cost the most
    for packed, part in zip(bits.split(CHUNK_BYTES), out.split(8 * CHUNK_BYTES), strict=True):
        values = decoded[: len(packed)]
        torch.index_select(values_of_byte, 0, packed.int(), out=values)
        part += values.flatten()[: len(part)]
