"""Random linear images of tensors, a few numbers each, in which means and sums can be checked."""

from __future__ import annotations

import torch
from torch import Tensor

NUM_IMAGES = 8
BLOCK = 1024  # values that share a sign of their own
CHUNK = 256 * BLOCK  # values converted to float64 at a time, so that they stay in the cache
HEAD = 64 * BLOCK  # first values of a tensor, which have an image of their own
SEED = 0x5EED


class Sketch:
    """Projections of tensors onto random signs (Alon, Matias and Szegedy 1999, section 2.2).

    The image of x is NUM_IMAGES sums of x_i * s_i in float64. It is linear, so the image of a mean
    is the mean of images; its mean square estimates the squared norm of x; and tensors that differ
    have the same image only by a rare chance. The sign of value i is that of its place in its
    block times that of the block, so signs of n values take NUM_IMAGES * (BLOCK + n / BLOCK)
    numbers. All ranks draw the same.

    Args:
        most_values: of the largest tensor.
        device: where tensors lie.
    """

    def __init__(self, most_values: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(SEED)
        num_blocks = -(-most_values // BLOCK) + 1

        def signs(rows: int) -> Tensor:
            drawn = torch.randint(0, 2, (rows, NUM_IMAGES), generator=generator)
            return (2 * drawn - 1).to(device, torch.float64)

        self._of_places, self._of_blocks = signs(BLOCK), signs(num_blocks)

    def image(self, values: Tensor, start: int = 0, head_only: bool = False) -> Tensor:
        """Return the images of a tensor, and of its first HEAD values: float64 [2, NUM_IMAGES].

        Args:
            values: [n], any real dtype; the tensor, or a part of it.
            start: place of the first value in its tensor.
            head_only: leave out the first image, which reads all values: [1, NUM_IMAGES].
        """
        whole = self._of_places.new_zeros(NUM_IMAGES)
        head_values = max(0, HEAD - start)
        for chunk in values[:head_values].split(CHUNK) if head_values else ():
            whole += self._of_chunk(chunk, start)
            start += len(chunk)
        head = whole.clone()
        if head_only:
            return head[None]
        for chunk in values[head_values:].split(CHUNK):
            whole += self._of_chunk(chunk, start)
            start += len(chunk)
        return torch.stack([whole, head])

    def _of_chunk(self, values: Tensor, start: int) -> Tensor:
        if not len(values):
            return values.new_zeros((), dtype=torch.float64)
        first, before = divmod(start, BLOCK)
        after = -(before + len(values)) % BLOCK
        padded = torch.nn.functional.pad(values.double(), (before, after))
        blocks = padded.view(-1, BLOCK) @ self._of_places
        return (blocks * self._of_blocks[first : first + len(blocks)]).sum(dim=0)


def norm(images: Tensor) -> Tensor:
    """Estimate the norms of tensors from their images [..., NUM_IMAGES]: float64 [...].

    It is exact for one value; else its relative standard error is about 1 / sqrt(2 NUM_IMAGES).
    """
    return images.square().mean(dim=-1).sqrt()
