"""The share of a step's time that goes into products: matrices, convolutions, attention, RNNs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from torch.autograd import DeviceType

# Names of torch's operations that multiply matrices; what is inside a fused one counts with it.
PRODUCT = re.compile(
    r"aten::_?((b?add|grouped_)?b?mm_?|(add)?mv_?|v?dot|.*convolution.*|.*rnn.*|.*lstm.*"
    r"|scaled_dot_product_.*_attention.*|flash_attention.*|efficient_attention.*)"
)
MARKS = ("ProfilerStep", "Optimizer.", "enumerate(", "autograd::")  # spans, not operations


def share_of_products(averages: Iterable[Any], on_gpu: bool) -> float | None:
    """Return the share of all operations' own time that products take; None without any time.

    Args:
        averages: torch.profiler's events, summed by name.
        on_gpu: take the time of kernels instead of the host's.
    """
    products_us = all_us = 0.0
    for each in averages:
        if each.device_type != DeviceType.CPU or each.key.startswith(MARKS):
            continue  # kernels count with the operation that launched them
        own_us = each.self_device_time_total if on_gpu else each.self_cpu_time_total
        all_us += own_us
        products_us += own_us if PRODUCT.fullmatch(each.key) else 0.0
    return products_us / all_us if all_us else None
