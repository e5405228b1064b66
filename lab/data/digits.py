"""Handwritten digits: real images that come with scikit-learn, so nothing is downloaded."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from lab.data.tensors import TensorData, check_positive

SPLIT_SEED = 0  # the test set is the same for all runs, whatever their seed
TEST_SHARE = 5  # one in five images of each class


def digits(*, size: int, seed: int, device: torch.device) -> TensorData:
    """1797 grey images of 10 digits (Alpaydin and Kaynak, 1998), scaled from 8 x 8 to `size` px.

    1437 train, 360 test, each class in the same proportion. `seed` changes nothing here.

    Raises:
        ValueError: `size` is no positive integer.
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    check_positive(size=size)
    pixels, labels = load_digits(return_X_y=True)
    train_index, test_index = train_test_split(
        range(len(labels)), test_size=1 / TEST_SHARE, stratify=labels, random_state=SPLIT_SEED
    )
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8)
    images = F.interpolate(images, size=(size, size), mode="bilinear", antialias=True)
    mean, std = images[train_index].mean(), images[train_index].std()
    images = (images - mean) / std
    targets = torch.tensor(labels, dtype=torch.int64)
    train = images[train_index], targets[train_index]
    return TensorData(train, (images[test_index], targets[test_index]), 10, device)
