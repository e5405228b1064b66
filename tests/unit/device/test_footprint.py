"""Memory of a step: what can be added up by hand, and the largest batch."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer

from lab.device.footprint import KINDS, StepSettings, footprint, largest_batch
from lab.model.convnet import vgg16
from lab.model.mlp import mlp
from lab.transform.transforms import Checkpoint


def sgd(momentum: float, model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.1, momentum=momentum)


def adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters())


STEP = StepSettings((1, 8, 8), torch.float32, torch.tensor(0), F.cross_entropy, partial(sgd, 0.9))


def small() -> nn.Module:
    with torch.device("meta"):
        return mlp(input_shape=(1, 8, 8), output_size=10, hidden=[1024])


@pytest.mark.parametrize(
    ("optimizer", "copies"), [(partial(sgd, 0.0), 0), (partial(sgd, 0.9), 1), (adamw, 2)]
)
def test_weights_gradients_and_state_add_up(
    optimizer: Callable[[nn.Module], Optimizer], copies: int
) -> None:
    model = small()
    values = sum(p.numel() for p in model.parameters())
    # So many samples that the peak is in backward, where the update's own temporaries are gone.
    found = footprint(model, replace(STEP, optimizer=optimizer), 4096).kinds
    assert tuple(found) == KINDS
    assert found["parameters"] == 4 * values
    assert 0 < found["gradients"] <= 4 * values  # those there are by then
    assert found["optimizer"] == pytest.approx(copies * 4 * values, abs=64)  # AdamW counts steps
    assert all(p.device.type == "meta" for p in model.parameters())  # left as it was


def test_activations_grow_with_the_batch_and_halve_with_the_precision() -> None:
    few, many, half = (
        footprint(small(), replace(STEP, precision=precision), batch).kinds["activations"]
        for precision, batch in (("fp32", 512), ("fp32", 1024), ("bf16", 1024))
    )
    assert many == pytest.approx(2 * few, rel=0.01)
    assert half < 0.7 * many


def test_vgg_16_needs_what_its_layers_add_up_to() -> None:
    with torch.device("meta"):
        model = vgg16(input_shape=(3, 224, 224), output_size=1000)
    step = replace(STEP, input_shape=(3, 224, 224))
    found = footprint(model, step, 64).kinds
    assert found["parameters"] == 4 * 138_357_544
    # Outputs of convolutions and pooling, each kept in place by its ReLU, of 64 images.
    sides = [(64, 224, 2), (128, 112, 2), (256, 56, 3), (512, 28, 3), (512, 14, 3)]
    kept = sum(count * width * side**2 + width * (side // 2) ** 2 for width, side, count in sides)
    assert found["activations"] > 64 * 4 * kept
    assert sum(found.values()) == pytest.approx(6.3e9, rel=0.02)


def test_the_largest_batch_fits_and_the_next_does_not() -> None:
    model = small()
    memory = 1.5e6
    batch = largest_batch(model, STEP, memory)
    assert footprint(model, STEP, batch).total_bytes <= memory
    assert footprint(model, STEP, batch + 1).total_bytes > memory
    assert largest_batch(model, STEP, 1000) == 0


def test_a_model_that_needs_values_is_refused_in_a_line() -> None:
    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.layer(x.flatten(1))
            return y if y.sum().item() > 0 else -y

    with torch.device("meta"):
        model = Asks()
    with pytest.raises(ValueError, match=r"^cannot run on tensors without values: [^\n]*$"):
        footprint(model, STEP, 2)


def test_modules_hold_their_parameters_and_outputs() -> None:
    first, *_, last = (each for each in footprint(small(), STEP, 32).modules if each["parameters"])
    assert (first["parameters"], first["outputs"]) == (4 * 65 * 1024, 4 * 32 * 1024)
    assert (last["parameters"], last["outputs"]) == (4 * 1025 * 10, 4 * 32 * 10)


def test_checkpointing_keeps_inputs_alone() -> None:
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8)))
    step = replace(STEP, input_shape=(64,))
    plain, kept = (
        footprint(model.to("meta"), step, 4096).kinds["activations"]
        for model in (blocks, Checkpoint(r"\d+")(deepcopy(blocks)))
    )
    assert kept < 0.7 * plain
