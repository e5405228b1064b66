"""Noise, for measurements only: nothing can be learnt from it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from lab.data import TensorData, image_data
from lab.data.tokens import Windows
from lab.settings import checks


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
        shape: (C, H, W) of one image.
        num_classes: labels are 0 to num_classes - 1.
        num_images: to train on.
    """
    sizes = tuple(shape) if isinstance(shape, Sequence) else ()
    if len(sizes) != 3 or not all(isinstance(size, int) and size >= 1 for size in sizes):
        raise ValueError(f"data.shape={shape}: must be three integers [C, H, W], each at least 1")
    checks.integer("data.num_classes", num_classes, 1)
    checks.integer("data.num_images", num_images, 1)
    num_test = max(1, num_images // 8)
    total = num_images + num_test
    generator = torch.Generator(device).manual_seed(seed)
    images = torch.randn(total, *sizes, generator=generator, device=device)
    labels = torch.randint(num_classes, (total,), generator=generator, device=device)
    return image_data(images, labels, num_test, device, num_classes)


def synthetic_tokens(
    *,
    seed: int,
    device: torch.device,
    vocabulary: int = 10_000,
    context: int = 32,
    num_sequences: int = 1024,
) -> Windows:
    """Return token ids, each as likely as the others, and an eighth as many for testing.

    Args:
        vocabulary: ids are 0 to vocabulary - 1.
        context: ids of a sequence.
        num_sequences: to train on.
    """
    checks.integer("data.vocabulary", vocabulary, 1)
    checks.integer("data.context", context, 1)
    checks.integer("data.num_sequences", num_sequences, 1)
    generator = np.random.default_rng(seed)
    train, test = (
        generator.integers(vocabulary, size=number * context + 1, dtype=np.int64)
        for number in (num_sequences, max(1, num_sequences // 8))
    )
    source = f"{num_sequences} sequences of random ids"
    return Windows(
        *(train, test), context=context, vocabulary=vocabulary, device=device, source=source
    )
