"""Handwritten digits that come with the lab: real images, nothing to download or to install."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import interpolate

from lab.data.tensors import TensorData

OWN_PX = 8


def digits(*, seed: int, device: torch.device, size: int = 32) -> TensorData:
    """The 1797 digits of UCI's optdigits test set, 1437 to train on and 360 to test on.

    Resized bilinearly; zero mean and unit variance over the training images. They are those of
    scikit-learn's load_digits, split by its train_test_split, stratified by class, and kept in a
    file here: importing scikit-learn takes every rank a second. (E. Alpaydin and C. Kaynak,
    Optical Recognition of Handwritten Digits, UCI Machine Learning Repository, 1998; CC BY 4.0.)

    Args:
        seed: unused; the split is always the same.
        device: where the images are kept.
        size: height and width, px.

    Raises:
        ValueError: `size` is not an integer of at least 8, the images' own size.
    """
    if not isinstance(size, int) or size < OWN_PX:
        raise ValueError(f"data.size={size}: must be an integer of at least {OWN_PX}")
    with np.load(Path(__file__).with_name("digits.npz")) as file:
        pixels, classes, num_test = file["pixels"], file["classes"], int(file["num_test"])
    images = torch.from_numpy(pixels).float().unsqueeze(1)
    images = interpolate(images, (size, size), mode="bilinear", align_corners=False)
    images = (images - images[:-num_test].mean()) / images[:-num_test].std()
    images, labels = images.to(device), torch.from_numpy(classes).long().to(device)
    train, test = slice(None, -num_test), slice(-num_test, None)
    return TensorData((images[train], labels[train]), (images[test], labels[test]), 10)
