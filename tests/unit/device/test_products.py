"""The share of products in a step's operations."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch.autograd import DeviceType
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from lab.device.throughput import share_of_products


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
