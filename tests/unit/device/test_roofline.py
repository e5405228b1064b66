"""Layers under a roofline, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lab.device.roofline import Roofs, rows_of
from lab.model.profile import Layer
from lab.model.work import LayerWork, Line, Operation, Work

NOTHING = Line(0.0, 0.0)
PRODUCT = Operation("convolution", Line(0.0, 1e6), Line(100.0, 1e3))
RELU = Operation("relu", NOTHING, Line(0.0, 2e3))
WORK = Work(
    (LayerWork("a", 10, (PRODUCT, RELU), (PRODUCT,)), LayerWork("norm", 4, (RELU,), (RELU,))), 4.0
)
LAYERS = [Layer("norm", 4, 3.0, 4.0), Layer("a", 10, 1.0, 2.0)]


ROOFS = Roofs(1e9, {1000: 1e9, 1_000_000: 1e6}, "made up")


def test_counts_and_times_of_the_same_layers_meet() -> None:
    forward, backward, norm, _ = rows_of(WORK, LAYERS, 8, ROOFS)
    assert (forward["layer"], forward["way"], norm["layer"]) == ("a", "forward", "norm")
    assert forward["flops"] == 8e6 and forward["num_bytes"] == 100 + 8 * 3e3
    assert (forward["seconds"], backward["seconds"]) == (1e-3, 2e-3)
    # ReLU beside a product could be fused into it; a layer without a product has none to join.
    assert forward["loose_bytes"] == 8 * 2e3
    assert backward["loose_bytes"] == norm["loose_bytes"] == 0


def test_the_roof_is_of_products_or_of_memory() -> None:
    fast = replace(ROOFS, bytes_per_s={1000: 1e9, 1_000_000: 1e10})
    by_memory, by_products = (rows_of(WORK, LAYERS, 8, roofs)[0] for roofs in (ROOFS, fast))
    assert (by_memory["bound"], by_products["bound"]) == ("memory", "products")
    assert by_memory["of_roof"] == pytest.approx(24.1e-3 / 1e-3)
    assert by_products["of_roof"] == pytest.approx(8e-3 / 1e-3)
    norm = rows_of(WORK, LAYERS, 8, ROOFS)[2]
    assert (norm["bound"], norm["of_roof"]) == ("memory", pytest.approx(16e-3 / 3e-3))
