"""Noise in the shape of images, for measurements only: nothing can be learnt from it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lab.data.tensors import TensorData


def synthetic(
    *,
    seed: int,
    device: torch.device,
    shape: Sequence[int] = (3, 32, 32),
    num_classes: int = 10,
    num_images: int = 1024,
) -> TensorData:
    """Return standard normal images with random labels, and an eighth as many for testing.

    Args:
        seed: of images and labels; the same on all ranks.
        device: where they are generated and kept.
        shape: (C, H, W) of one image.
        num_classes: labels are 0 to num_classes - 1.
        num_images: to train on.

    Raises:
        ValueError: an argument out of range.
    """
    sizes = tuple(shape) if isinstance(shape, Sequence) else ()
    if len(sizes) != 3 or not all(isinstance(size, int) and size >= 1 for size in sizes):
        raise ValueError(f"data.shape={shape}: must be [C, H, W], integers of at least 1")
    for name, value in (("num_classes", num_classes), ("num_images", num_images)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"data.{name}={value}: must be an integer of at least 1")
    total = num_images + max(1, num_images // 8)
    generator = torch.Generator(device).manual_seed(seed)
    images = torch.randn(total, *sizes, generator=generator, device=device)
    labels = torch.randint(num_classes, (total,), generator=generator, device=device)
    return TensorData(
        (images[:num_images], labels[:num_images]),
        (images[num_images:], labels[num_images:]),
        unit="image",
        num_classes=num_classes,
    )
