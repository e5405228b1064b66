"""Handwritten digits that come with scikit-learn: real images, nothing to download."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn.functional import interpolate

from lab.data.tensors import TensorData

OWN_PX = 8
NUM_TEST = 360


def digits(*, seed: int, device: torch.device, size: int = 32) -> TensorData:
    """The 1797 digits of UCI's optdigits test set, 1437 to train on and 360 to test on.

    Resized bilinearly; zero mean and unit variance over the training images.

    Args:
        seed: unused; the split, stratified by class, is always the same.
        device: where the images are kept.
        size: height and width, px.

    Raises:
        ValueError: `size` is not an integer of at least 8, the images' own size.
    """
    if not isinstance(size, int) or size < OWN_PX:
        raise ValueError(f"data.size={size}: must be an integer of at least {OWN_PX}")
    from sklearn.datasets import load_digits  # slow to import
    from sklearn.model_selection import train_test_split

    pixels, classes = load_digits(return_X_y=True)
    train, test = train_test_split(
        np.arange(len(classes)), test_size=NUM_TEST, stratify=classes, random_state=0
    )
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, OWN_PX, OWN_PX)
    images = interpolate(images, (size, size), mode="bilinear", align_corners=False)
    images = (images - images[train].mean()) / images[train].std()
    images, labels = images.to(device), torch.tensor(classes).to(device)
    return TensorData((images[train], labels[train]), (images[test], labels[test]), 10)
