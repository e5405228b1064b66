"""Images of tensors: linear, the same in any layout, and different for other values."""

from __future__ import annotations

import pytest
import torch

from lab.certificate.watch import BLOCK, HEAD, NUM_IMAGES, Sketch, norm

CPU = torch.device("cpu")
SIZES = (1, BLOCK, 5 * BLOCK + 7, HEAD + 3 * BLOCK + 1)


@pytest.fixture(scope="module")
def sketch() -> Sketch:
    return Sketch(max(SIZES), CPU)


@pytest.mark.parametrize("size", SIZES)
def test_the_image_of_a_sum_is_the_sum_of_images(sketch: Sketch, size: int) -> None:
    x, y = torch.randn(2, size, dtype=torch.float64)
    together = sketch.image(2 * x - y)
    assert together.shape == (2, NUM_IMAGES)
    apart = 2 * sketch.image(x) - sketch.image(y)
    torch.testing.assert_close(together, apart, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("size", SIZES)
def test_parts_add_up_to_the_whole(sketch: Sketch, size: int) -> None:
    x, cut = torch.randn(size), size // 3
    parts = sketch.image(x[:cut]) + sketch.image(x[cut:], cut)
    torch.testing.assert_close(parts, sketch.image(x), rtol=1e-10, atol=1e-10)
    head = sketch.image(x[:HEAD])[0]
    torch.testing.assert_close(sketch.image(x)[1], head)
    torch.testing.assert_close(sketch.image(x, head_only=True), head[None])
    assert not sketch.image(x, HEAD, head_only=True).any()


@pytest.mark.parametrize("size", SIZES)
def test_one_value_that_differs_shows(sketch: Sketch, size: int) -> None:
    x = torch.randn(size)
    other = x.clone()
    other[size // 2] += 1e-4
    distance = norm(sketch.image(x)[0] - sketch.image(other)[0])
    assert distance == pytest.approx(1e-4, rel=1e-2)  # a single sign: exact but for float32


def test_the_norm_is_estimated(sketch: Sketch) -> None:
    assert norm(sketch.image(torch.tensor([-3.0]))[0]) == 3
    estimates = [norm(sketch.image(torch.randn(4000))[0]) / 4000**0.5 for _ in range(200)]
    assert 0.9 < float(torch.stack(estimates).square().mean()) < 1.1
    assert min(estimates) > 0.3 and max(estimates) < 2.5
