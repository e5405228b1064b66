"""Factors of low rank: where power iteration starts, and one message for the factors of all."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor


def random_factor(name: str, rank: int, columns: int, device: torch.device) -> Tensor:
    """Return parameter `name`'s first Q^T: random, float32 [rank, columns], equal on all ranks."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(rank, columns, generator=generator).to(device)


def orthonormal(p: Tensor) -> Tensor:
    """Return an orthonormal basis of the columns of `p`, float32 [rows, rank].

    It comes from QR, not Gram-Schmidt, which fails on a matrix of lower rank.
    """
    return torch.linalg.qr(p).Q.contiguous()


def together(shapes: Sequence[Sequence[int]], like: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return a vector to send, and tensors of `shapes` that share its memory in order."""
    sizes = [math.prod(shape) for shape in shapes]
    message = like.new_empty(sum(sizes))
    parts = message.split(sizes)
    return message, [part.view(*shape) for part, shape in zip(parts, shapes, strict=True)]
