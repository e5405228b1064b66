"""Layers under a roofline, by hand."""

from __future__ import annotations

import pytest

from lab.device.roofline import Roofs, spots
from lab.model.profile import Layer
from lab.model.work import LayerWork, Line, Operation, Work

NOTHING = Line(0.0, 0.0)
PRODUCT = Operation("convolution", Line(0.0, 1e6), Line(100.0, 1e3))
RELU = Operation("relu", NOTHING, Line(0.0, 2e3))
WORK = Work(
    (LayerWork("a", 10, (PRODUCT, RELU), (PRODUCT,)), LayerWork("norm", 4, (RELU,), (RELU,))), 4.0
)
LAYERS = [Layer("norm", 4, 3.0, 4.0), Layer("a", 10, 1.0, 2.0)]


def test_counts_and_times_of_the_same_layers_meet() -> None:
    forward, backward, norm, _ = spots(WORK, LAYERS, 8)
    assert (forward.layer, forward.way, norm.layer) == ("a", "forward", "norm")
    assert forward.flops == 8e6 and forward.num_bytes == 100 + 8 * 3e3
    assert (forward.seconds, backward.seconds) == (1e-3, 2e-3)
    # ReLU beside a product could be fused into it; a layer without a product has none to join.
    assert forward.loose_bytes == 8 * 2e3
    assert backward.loose_bytes == norm.loose_bytes == 0


def test_the_roof_is_of_products_or_of_memory() -> None:
    roofs = Roofs(1e9, {1000: 1e9, 1_000_000: 1e6}, "made up")
    forward, _, norm, _ = spots(WORK, LAYERS, 8)
    assert forward.bound_s(roofs) == pytest.approx((8e-3, 24.1e-3))
    assert norm.bound_s(roofs) == pytest.approx((0.0, 16e-3))
