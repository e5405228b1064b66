"""Decode image files to tensors, in the decoding processes."""

from __future__ import annotations

import math
import warnings

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

CENTRE = 224 / 256  # share of the shorter side that a test image keeps

File = tuple[str, int]  # path and label
Box = tuple[float, float, float, float]  # left, top, right, bottom, px


class CorruptImage(ValueError):
    """A file that cannot be decoded. Its text is one line that names the file."""


Sample = tuple[Tensor, int] | CorruptImage


class ImageFiles(Dataset):
    """Decoded files: (epoch, index) -> pixels uint8 [3, size, size] and label.

    A file that cannot be decoded gives a CorruptImage instead: one raised in a worker would reach
    the parent wrapped in the worker's traceback.
    """

    def __init__(self, files: list[File], size: int, augment_seed: int | None) -> None:
        self.files = files
        self.size = size
        self.augment_seed = augment_seed

    def __getitem__(self, key: tuple[int, int]) -> Sample:
        epoch, index = key
        path, label = self.files[index]
        rng = None
        if self.augment_seed is not None:
            rng = np.random.default_rng([self.augment_seed, epoch, index])
        try:
            return decode(path, self.size, rng), label
        except Exception as error:  # Pillow's decoders raise many types
            reason = next(iter(str(error).splitlines()), "") or type(error).__name__
            return CorruptImage(f"data.path: cannot read the image {path}: {reason}")


def collate(samples: list[Sample]) -> tuple[Tensor, Tensor] | CorruptImage:
    """Stack pixels uint8 [batch, 3, size, size] and labels int64 [batch].

    If an image is corrupt, it is returned instead.
    """
    images, labels = [], []
    for sample in samples:
        if isinstance(sample, CorruptImage):
            return sample
        images.append(sample[0])
        labels.append(sample[1])
    return torch.stack(images), torch.tensor(labels)


def decode(path: str, size: int, rng: np.random.Generator | None) -> Tensor:
    """Return pixels uint8 [3, size, size]: a random crop, maybe mirrored; without `rng` the centre.

    Raises:
        Exception: of any type; the file is not a readable image.
    """
    with warnings.catch_warnings(action="ignore"), Image.open(path) as file:
        image = file.convert("RGB")
    box = random_crop(*image.size, rng) if rng else centre_crop(*image.size, CENTRE)
    image = image.resize((size, size), Image.Resampling.BILINEAR, box)
    if rng and rng.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def random_crop(width: int, height: int, rng: np.random.Generator) -> Box:
    """Draw a box with 8 to 100 % of the area and an aspect ratio from 3/4 to 4/3.

    If ten draws do not fit (a very long image), return the largest centred square.
    """
    for _ in range(10):
        area = width * height * rng.uniform(0.08, 1)
        ratio = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(rng.integers(width - w + 1)), int(rng.integers(height - h + 1))
            return left, top, left + w, top + h
    return centre_crop(width, height, 1)


def centre_crop(width: int, height: int, share: float) -> Box:
    """Return the centred square whose side is `share` of the shorter side."""
    side = share * min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side
