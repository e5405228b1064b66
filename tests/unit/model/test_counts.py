"""Counts of parameters and operations."""

from __future__ import annotations

from typing import Any

from torch import nn

from lab.measure.operations import counts_of
from lab.model.alexnet import alexnet_paper
from lab.model.facts import Counts
from lab.model.mlp import mlp


def test_of_an_mlp_by_hand() -> None:
    def make(**shape: Any) -> nn.Module:
        return mlp(**shape, hidden=[10])

    inputs = 3 * 224 * 224
    parameters = 10 * inputs + 10 + 11 * 1000
    operations = {"fc1": 2 * 10 * inputs, "fc2": 2 * 10 * 1000}
    assert counts_of(make) == Counts(parameters, parameters, operations)


def test_conv2_of_the_paper_is_the_product_on_its_slide() -> None:
    counted = counts_of(alexnet_paper)
    # C, H, W, R, S and K of slide 8.
    assert counted.operations["conv2"] == 2 * 96 * 27 * 27 * 5 * 5 * 256
    assert [*counted.operations] == [*(f"conv{n}" for n in range(1, 6)), "fc6", "fc7", "fc8"]
    assert (counted.parameters, counted.fully_connected) == (62_378_344, 58_631_144)


def test_groups_divide_the_operations() -> None:
    def make(**_shape: Any) -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 6, 5, stride=4, groups=3))

    height = (224 - 5) // 4 + 1
    assert counts_of(make).operations == {"conv1": 2 * 6 * height * height * 5 * 5}
