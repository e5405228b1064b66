"""Models with odd gradients, and odd data, named by `_target_`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.data import TensorData

SIDE, CLASSES, FAULT = 16, 10, 3  # FAULT: the forward whose gradient has a bad value
SHAPES = [(64, 32), (32,), (40, 64), (10,)]
SCALES = {"zero": 0.0, "denormal": 1e-40, "huge": 1e30}
BAD = {"nan on one rank": torch.nan, "infinity on one rank": torch.inf}
KINDS = (*SCALES, *BAD)


class Odd(nn.Module):
    """Outputs that give odd gradients: [batch, ...] -> [batch, 10].

    Args:
        kind: one of KINDS.
    """

    def __init__(self, *, input_shape: tuple[int, ...], output_size: int, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ParameterList(nn.Parameter(0.01 * torch.randn(shape)) for shape in SHAPES)
        self.scale, self.bad = SCALES.get(kind, 1.0), BAD.get(kind)
        self.output_size, self.num_forwards = output_size, 0

    def forward(self, inputs: Tensor) -> Tensor:
        """Sum every tenth value of all parameters, times the mean of an input."""
        flat = torch.cat([part.reshape(-1) for part in self.parts])
        if self.training:
            self.num_forwards += 1
            if self.num_forwards > FAULT and self.bad is not None and os.environ["RANK"] == "1":
                flat.register_hook(self._spoil)
        padded = F.pad(flat, (0, -len(flat) % self.output_size))
        sums = padded.view(-1, self.output_size).sum(0)
        return _Scaled.apply(inputs.flatten(1).mean(1, keepdim=True) * sums, self.scale)

    def _spoil(self, gradient: Tensor) -> Tensor:
        assert self.bad is not None
        return torch.cat([gradient.new_full((1,), self.bad), gradient[1:]])


class _Scaled(torch.autograd.Function):
    """Scales gradients alone, so that losses stay ordinary."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return outputs.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.scale, None


def data(*, seed: int, device: torch.device, kind: str) -> TensorData:
    """Return images [1, 16, 16] of ten classes that are odd in one way."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.rand(64, 1, SIDE, SIDE, generator=generator)
    targets = torch.arange(64) % CLASSES
    train, test = (images, targets), (images[:20], targets[:20])
    if kind == "fewer samples than ranks":
        train = images[:2], targets[:2]
    elif kind == "no test samples":
        test = images[:0], targets[:0]
    elif kind == "no training samples":
        train = images[:0], targets[:0]
    elif kind == "a class without samples":
        train = images, targets % (CLASSES - 1)
    elif kind == "a label below zero":
        targets[5] = -1
    elif kind == "a label too high":
        targets[-1] = CLASSES
    elif kind == "a pixel that is not a number":
        images[7, 0, 3, 3] = torch.nan
    else:
        raise ValueError(f"data.kind={kind}: allowed: {', '.join(DATA)}")
    (train, test) = ([part.to(device) for part in pair] for pair in (train, test))
    return TensorData((train[0], train[1]), (test[0], test[1]), unit="image", num_classes=CLASSES)


DATA = (
    *("fewer samples than ranks", "no test samples", "no training samples"),
    *("a class without samples", "a label below zero", "a label too high"),
    "a pixel that is not a number",
)


def write_images(folder: Path, sizes: tuple[tuple[int, int], ...], corrupt: int = -1) -> None:
    """Write images of two classes, as large as `sizes` say in turn; one may be cut off."""
    from PIL import Image

    for label in ("cat", "dog"):
        (folder / label).mkdir(parents=True)
        for number in range(30):
            size = sizes[number % len(sizes)]
            path = folder / label / f"{number}.png"
            Image.new("RGB", size, (8 * number, 0, 0)).save(path)
            if number == corrupt:
                path.write_bytes(path.read_bytes()[:60])
