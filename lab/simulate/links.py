"""Predict one emulated cluster from another: the same machine, with other links or a straggler."""

from __future__ import annotations

from dataclasses import replace

from lab.cluster.settings import Cluster, bits_per_s
from lab.simulate.hardware import Hardware


def over_links(hardware: Hardware, fitted: Cluster, other: Cluster) -> Hardware:
    """Return hardware that was fitted to cells of one cluster as it is on another.

    Links reach the same share of their nominal rate, and a delay adds to their latency.

    Raises:
        ValueError: links without a rate, that lose packets or that change have no cost model.
    """
    assert hardware.inter is not None  # emulated hosts are nodes
    if None in (*fitted.rates, *other.rates) or len(set(fitted.rates)) > 1:
        raise ValueError("cluster.rates: must be limited, and alike where cells are fitted")
    if other.loss_percent or other.changes:
        raise ValueError("cluster.loss_percent, cluster.changes: have no cost model")
    nominal = bits_per_s(str(fitted.rates[0]))
    carried = hardware.inter.bandwidth_bytes_per_s / nominal
    rates = tuple(carried * bits_per_s(str(rate)) for rate in other.rates)
    slow = other.slow_host is not None
    return replace(
        hardware,
        inter=replace(
            hardware.inter,
            bandwidth_bytes_per_s=min(rates),
            latency_s=hardware.inter.latency_s + (other.delay_ms - fitted.delay_ms) / 1000,
        ),
        node_rates=rates if len(set(rates)) > 1 else (),
        num_slow=other.ranks_per_host if slow else 0,
        slow_factor=other.slow_factor if slow else 1.0,
    )
