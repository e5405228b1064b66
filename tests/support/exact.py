"""Kernels of GPUs as Triton interprets them, against arithmetic in double precision."""

from __future__ import annotations

import importlib
import math

import torch
from torch import Tensor

from lab.codec.base import Codec
from lab.codec.codecs import Cast, Float8, Int4, Int8, Levels, OneBit, Signs, TopK
from lab.codec.layout import Draws, Factors
from lab.exchange.randomk import places

CODECS: dict[str, Codec] = {
    "onebit": OneBit(min_columns=1),
    "onebit mean": OneBit("mean", min_columns=1),
    "int8": Int8(64),
    "int4": Int4(32),
    "float8": Float8(32),
    "bfloat16": Cast("bfloat16"),
    "float16": Cast("float16"),
    "signs": Signs(1),
    "topk": TopK(0.03),
}
NAMES = (*CODECS, "randomk", "low rank")
SHAPES = {"w": (3, 333), "v": (5, 64), "b": (7,)}  # odd rows and even ones
NUM_VALUES, NUM_MESSAGES = sum(map(math.prod, SHAPES.values())), 3


def error_of(name: str, dtype: torch.dtype) -> float:
    """Return the largest error of what kernels deliver of random gradients, over the largest value.

    Args:
        name: one of NAMES.
        dtype: of the gradients, which are given as float32.
    """
    generator = torch.Generator().manual_seed(5)
    drawn = torch.randn(NUM_MESSAGES, NUM_VALUES, generator=generator).to(dtype).float()
    if name == "randomk":
        found, true = _of_randomk(drawn)
    elif name == "low rank":
        found, true = _of_low_rank(drawn[0, :999].view(27, 37))
    else:
        found, true = _of_codec(CODECS[name], drawn)
    return float((found.double() - true).abs().max() / true.abs().max())


def _of_codec(codec: Codec, gradients: Tensor) -> tuple[Tensor, Tensor]:
    kernels = importlib.import_module("lab.codec.gpu").made(codec.reading)
    layout = codec.layout(SHAPES, NUM_VALUES, 1)
    messages = torch.zeros(NUM_MESSAGES, layout.num_bytes, dtype=torch.uint8)
    for gradient, message in zip(gradients, messages, strict=True):
        kernels.encode(layout, gradient, None, message)
    mean, finite = torch.empty(NUM_VALUES), torch.ones((), dtype=torch.bool)
    kernels.add_up(layout, messages, mean, NUM_MESSAGES, finite)
    assert finite
    true = gradients.double()
    for piece in layout.pieces:
        for rows in true:
            own = rows[piece.start : piece.stop].view(piece.rows, piece.columns)
            own.copy_(torch.stack([delivered(codec, row) for row in own]))
    return mean, true.mean(dim=0)


def delivered(codec: Codec, row: Tensor) -> Tensor:
    """Return what a codec makes of a row, float64 [columns]."""
    if isinstance(codec, OneBit):
        split = row.mean() if codec.threshold == "mean" else row.new_zeros(())
        upper = row >= split
        if codec.threshold == "mean":
            distance = (row - split).abs().mean()
            return torch.where(upper, split + distance, split - distance)
        means = [row[side].mean() if side.any() else split for side in (upper, ~upper)]
        return torch.where(upper, *means)
    if isinstance(codec, Signs):
        magnitude = row.abs().mean()
        return torch.where(row < 0, -magnitude, magnitude)
    if isinstance(codec, Levels):
        # Of two levels as near, float32 may choose either: so both choose in it.
        spread, least = (row.max() - row.min()).float(), torch.finfo(torch.float32).tiny
        low, step = row.min().float(), (spread / (codec.num_levels - 1)).clamp(min=least)
        level = ((row.float() - low) / step + 0.5).floor().double()
        return row.min() + level * (row.max() - row.min()) / (codec.num_levels - 1)
    if isinstance(codec, Float8):
        scale = row.abs().max() / 448
        return (row / scale).to(torch.float8_e4m3fn).double() * scale
    if isinstance(codec, Cast):
        return row.to(codec.dtype).double()
    assert isinstance(codec, TopK)
    chosen = row.abs().topk(math.ceil(codec.ratio * len(row))).indices
    return torch.zeros_like(row).index_copy(0, chosen, row[chosen])


def _of_randomk(gradients: Tensor) -> tuple[Tensor, Tensor]:
    kernels = importlib.import_module("lab.codec.gpu_randomk").made()
    sent = math.ceil(0.3 * NUM_VALUES)
    draws, total, mean = (
        Draws([NUM_VALUES], [sent], [9]),
        torch.zeros(sent),
        torch.empty(NUM_VALUES),
    )
    for gradient in gradients:
        own, probe = torch.empty(sent), torch.zeros(())
        kernels.encode(draws, gradient, None, own, probe)
        total += own
    kernels.decode(draws, total, mean, NUM_MESSAGES)
    chosen = places(NUM_VALUES, sent, 9, gradients.device)
    true = torch.zeros(NUM_VALUES, dtype=torch.float64)
    return mean, true.index_copy(0, chosen, gradients.double().mean(dim=0)[chosen])


def _of_low_rank(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Rebuild a matrix of rank 2 by one step of power iteration, as it is."""
    kernels = importlib.import_module("lab.codec.gpu_low_rank").made()
    rows, columns = matrix.shape
    matrix = (matrix[:, :1] @ matrix[:1] + matrix[:, 1:2] @ matrix[1:2]).contiguous()
    factors, out = Factors([(0, rows, columns, 2)]), torch.empty(rows, columns)
    p, q = torch.empty(rows, 2), torch.randn(2, columns, generator=torch.Generator().manual_seed(6))
    kernels.project(factors, matrix, None, q, p)
    kernels.orthonormalise(factors, p, [p])
    kernels.project_back(factors, matrix, p, q, False)
    kernels.rebuild(factors, p, q, out)
    return out, matrix.double()
