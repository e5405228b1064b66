"""Throughput: the share of products in a step, and published formulae beside counts."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.autograd import DeviceType
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from lab.device.throughput import estimate, share_of_products, transformer_module
from lab.model.convnet import lenet
from lab.model.lstm import LSTM
from lab.model.mlp import mlp
from lab.model.transformer import Transformer


@dataclass
class Event:
    """One line of torch.profiler's sums."""

    key: str
    self_cpu_time_total: float
    self_device_time_total: float = 0.0
    device_type: DeviceType = DeviceType.CPU


EVENTS = [
    Event("aten::addmm", 30, 70),
    Event("aten::mkldnn_convolution", 10),
    Event("aten::convolution_backward", 10),
    Event("aten::relu", 50, 30),
    Event("Optimizer.step#SGD.step", 900),
    Event("gemm_kernel", 0, 70, DeviceType.CUDA),
]


def test_products_are_told_from_the_rest_on_the_host_and_on_the_device() -> None:
    assert share_of_products(EVENTS, on_gpu=False) == pytest.approx(0.5)
    assert share_of_products(EVENTS, on_gpu=True) == pytest.approx(0.7)
    assert share_of_products([], on_gpu=False) is None


@pytest.mark.parametrize("name", ["mv", "dot", "addbmm", "baddbmm_", "_grouped_mm", "cudnn_rnn"])
def test_rarer_products_are_products_too(name: str) -> None:
    events = [Event(f"aten::{name}", 1), Event("aten::cummax", 1), Event("aten::add", 2)]
    assert share_of_products(events, on_gpu=False) == 0.25


def test_torchs_own_names_are_known() -> None:
    a, image, filters = torch.randn(512, 512), torch.randn(4, 32, 32, 32), torch.randn(32, 32, 3, 3)
    with profile(activities=[ProfilerActivity.CPU]) as only_products:
        for _ in range(3):
            torch.mm(a, a)
            F.conv2d(image, filters)
    with profile(activities=[ProfilerActivity.CPU]) as without:
        torch.add(torch.relu(a), a)
    found = share_of_products(only_products.key_averages(), on_gpu=False)
    assert found and found > 0.6
    assert share_of_products(without.key_averages(), on_gpu=False) == 0


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
    assert found["formula_flops"] == 2 * (20 * 28 * 28 * 25 + 50 * 10 * 10 * 20 * 25)
    found = estimate(lstm, (length,), torch.int64)
    assert found["formula_flops"] == 16 * 32**2 * 3 * length
    found = estimate(transformer, (length,), torch.int64)
    assert found["formula_flops"] == 3 * transformer_module(length, width=48, heads=3)
    assert estimate(connected, (1, 8, 8), torch.float32) == {}


def test_a_cell_has_four_gates_of_two_products() -> None:
    with torch.device("meta"):
        gates = nn.Linear(2 * 96, 4 * 96)
        assert forward_flops(gates, torch.empty(1, 2 * 96)) == 16 * 96**2


@pytest.mark.parametrize(("length", "width"), [(32, 64), (128, 64)])
def test_a_module_of_encoder_and_decoder_takes_other_terms_than_printed(
    length: int, width: int
) -> None:
    """Count torch's own layers, as docs/device.md explains the difference."""
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
