"""Hardware fitted on one emulated cluster, carried to others."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from lab.cluster.settings import Change, Cluster
from lab.simulate.hardware import Hardware, Link
from lab.simulate.observe import over_links

FITTED = Hardware("fitted", "made up", "gloo", 1, None, Link(1e-4, 1.1e8), math.inf)
GIGABIT = Cluster(1, ("1gbit", "1gbit"))


def test_links_keep_their_share_of_the_nominal_rate() -> None:
    slower = over_links(FITTED, GIGABIT, Cluster(1, ("100mbit",) * 4, delay_ms=5))
    assert slower.inter
    assert slower.inter.latency_s == pytest.approx(5.1e-3)
    assert slower.inter.bandwidth_bytes_per_s == pytest.approx(1.1e7)
    assert slower.node_rates == () and slower.num_slow == 0


def test_hosts_may_have_rates_of_their_own_and_one_may_be_slow() -> None:
    mixed = Cluster(2, ("1gbit", "300mbit"), slow_host=1, slow_factor=1.5)
    found = over_links(FITTED, GIGABIT, mixed)
    assert found.node_rates == pytest.approx((1.1e8, 3.3e7))
    assert (found.num_slow, found.slow_factor) == (2, 1.5)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (Cluster(1, (None, None)), "cluster.rates: must be limited"),
        (replace(GIGABIT, loss_percent=1.0), "cluster.loss_percent"),
        (replace(GIGABIT, changes=(Change(1.0, 0, "down"),)), "cluster.changes"),
    ],
)
def test_what_has_no_cost_model_is_refused(other: Cluster, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        over_links(FITTED, GIGABIT, other)
