"""Published formulae beside counts of the same models."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lab.device.throughput import cell, estimate, transformer_module
from lab.model.convnet import lenet
from lab.model.lstm import LSTM
from lab.model.mlp import mlp
from lab.model.transformer import Transformer


def forward_flops(model: nn.Module, *inputs: torch.Tensor) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(*inputs)
    return counter.get_total_flops()


def test_each_kind_of_model_has_its_formula() -> None:
    length = 16
    with torch.device("meta"):
        images = lenet(input_shape=(1, 32, 32), output_size=10)
        lstm = LSTM(vocabulary=64, layers=3, hidden=32)
        transformer = Transformer(vocabulary=64, context=length, size="nano")
        connected = mlp(input_shape=(1, 8, 8), output_size=10)
    found = estimate(images, (1, 32, 32), torch.float32)
    assert found and found.flops == 2 * (20 * 28 * 28 * 25 + 50 * 10 * 10 * 20 * 25)
    found = estimate(lstm, (length,), torch.int64)
    assert found and found.flops == 16 * 32**2 * 3 * length
    found = estimate(transformer, (length,), torch.int64)
    assert found and found.flops == 3 * transformer_module(length, width=48, heads=3)
    assert estimate(connected, (1, 8, 8), torch.float32) is None


def test_a_cell_has_four_gates_of_two_products() -> None:
    with torch.device("meta"):
        gates = nn.Linear(2 * 96, 4 * 96)
        assert forward_flops(gates, torch.empty(1, 2 * 96)) == cell(96)


@pytest.mark.parametrize(("length", "width"), [(32, 64), (128, 64)])
def test_a_module_of_encoder_and_decoder_takes_other_terms_than_printed(
    length: int, width: int
) -> None:
    """Count torch's own layers, as docs/layers.md explains the difference."""
    heads = 8
    with torch.device("meta"):
        encoder = nn.TransformerEncoderLayer(width, heads, 4 * width, batch_first=True)
        decoder = nn.TransformerDecoderLayer(width, heads, 4 * width, batch_first=True)
        tokens = torch.empty(1, length, width)
    of_encoder = forward_flops(encoder, tokens)
    of_decoder = forward_flops(decoder, tokens, tokens)
    squared, pairs = length * width**2, length**2 * width
    assert of_encoder == 8 * squared + 4 * pairs + 16 * squared
    assert of_decoder == 2 * (8 * squared + 4 * pairs) + 16 * squared
    printed = transformer_module(length, width, heads)
    assert printed == (64 + 6 / heads) * squared + 6 * pairs
    assert printed - of_encoder - of_decoder == (8 + 6 / heads) * squared - 6 * pairs
