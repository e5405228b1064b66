"""Handwritten digits that come with the lab: real images, nothing to download or to install."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample, interpolate

from lab.data import TensorData, image_data
from lab.settings import checks

NATIVE_PX, MOST_PX = 8, 4096


def digits(*, seed: int, device: torch.device, size: int = 32) -> TensorData:
    """Return the 1797 digits of UCI's optdigits test set, 1437 to train on and 360 to test on.

    Resized bilinearly; zero mean and unit variance over the training images. They are those of
    scikit-learn's load_digits, split by its train_test_split, stratified by class, and kept in a
    file here: importing scikit-learn takes every rank a second. (E. Alpaydin and C. Kaynak,
    Optical Recognition of Handwritten Digits, UCI Machine Learning Repository, 1998; CC BY 4.0.)

    Args:
        size: height and width, px.

    Raises:
        ValueError: `size` is not an integer from 8, the images' native size, to MOST_PX.
    """
    images, classes, num_test = _load(size)
    images = (images - images[:-num_test].mean()) / images[:-num_test].std()
    return image_data(images, classes, num_test, device, num_classes=10)


def rotated_digits(
    *, seed: int, device: torch.device, size: int = 32, max_degrees: float = 45.0
) -> TensorData:
    """Return the digits of `digits`, each turned by a random angle, which is its target.

    Targets are float32 radians, uniform between plus and minus `max_degrees`, counterclockwise.

    Args:
        seed: of the angles.
        size: height and width, px.
        max_degrees: largest angle.

    Raises:
        ValueError: `size` is not an integer from 8 to MOST_PX, or `max_degrees` not a number above
            0 and up to 180.
    """
    checks.number("data.max_degrees", max_degrees, above=0, at_most=180)
    images, _, num_test = _load(size)
    generator = torch.Generator().manual_seed(seed)
    angles = math.radians(max_degrees) * (2 * torch.rand(len(images), generator=generator) - 1)
    images = _rotate(images, angles)
    images = (images - images[:-num_test].mean()) / images[:-num_test].std()
    return image_data(images, angles, num_test, device, num_classes=None)


def _load(size: object) -> tuple[Tensor, Tensor, int]:
    """Read resized images float32 [n, 1, size, size], classes int64 [n], and how many are tests."""
    size = checks.integer("data.size", size, NATIVE_PX, MOST_PX)
    with np.load(Path(__file__).with_name("digits.npz")) as file:
        pixels, classes, num_test = file["pixels"], file["classes"], int(file["num_test"])
    images = torch.from_numpy(pixels).float().unsqueeze(1)
    images = interpolate(images, (size, size), mode="bilinear", align_corners=False)
    return images, torch.from_numpy(classes).long(), num_test


def _rotate(images: Tensor, angles: Tensor) -> Tensor:
    """Turn images [n, C, H, W] counterclockwise by angles [n] in radians; corners become 0."""
    cos, sin, zero = angles.cos(), angles.sin(), torch.zeros_like(angles)
    rows = [torch.stack(row, dim=1) for row in ((cos, -sin, zero), (sin, cos, zero))]
    grid = affine_grid(torch.stack(rows, dim=1), list(images.shape), align_corners=False)
    return grid_sample(images, grid, align_corners=False)
