"""Random images, for throughput: any shape, no disk."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lab.data.data import Batch
from lab.data.tensors import TensorData, check_positive

TEST_SHARE = 8  # one test image for so many training images


def synthetic(
    *,
    shape: Sequence[int],
    num_classes: int,
    num_images: int,
    seed: int,
    device: torch.device,
) -> TensorData:
    """Normal noise with random labels, made once on the device and used over and over.

    Args:
        shape: (channels, height, width).
        num_images: to train on; an eighth as many more to test on.

    Raises:
        ValueError: a size is no positive integer.
    """
    if isinstance(shape, str) or len(shape) != 3:
        raise ValueError(f"data.shape={shape}: must be [channels,height,width]")
    check_positive(num_classes=num_classes, num_images=num_images)
    for side in shape:
        check_positive(shape=side)
    generator = torch.Generator(device).manual_seed(seed)

    def images(count: int) -> Batch:
        pixels = torch.randn((count, *shape), generator=generator, device=device)
        labels = torch.randint(num_classes, (count,), generator=generator, device=device)
        return pixels, labels

    test = images(max(1, num_images // TEST_SHARE))
    return TensorData(images(num_images), test, num_classes, device)
