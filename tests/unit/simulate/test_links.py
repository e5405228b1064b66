"""Hardware fitted on one emulated cluster, carried to others; and where strategies cross over."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from lab.claims.predicted import MARGIN, crossover_batch, crossover_rate, profile_of
from lab.cluster.settings import Change, Cluster
from lab.simulate.fit import over_links
from lab.simulate.hardware import Hardware, Link, with_rate
from lab.simulate.step import predict, simulate
from tests.support.simulated import FLAT, strategy

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


def test_crossings() -> None:
    profile = profile_of("alexnet_titanx", 0.02)
    tree, onebit, overlap = map(strategy, ("tree", "onebit", "overlap"))
    batch_size = crossover_batch(profile, FLAT, tree, 4)
    assert batch_size and batch_size % 4 == 0
    pays = {b: predict(profile, FLAT, tree, 4, b).speedup > 1 for b in (batch_size - 4, batch_size)}
    assert pays == {batch_size - 4: False, batch_size: True}
    endless = replace(FLAT, inter=Link(0.0, 1.0))
    assert crossover_batch(profile, endless, tree, 4) is None
    coded = replace(FLAT, codec_bytes_per_s=1e10)
    rate = crossover_rate(profile, coded, (onebit, overlap), 4, 256)
    assert rate
    for factor, pays in ((0.9, True), (1.1, False)):
        links = with_rate(coded, factor * rate)
        one, other = (simulate(profile, links, each, 4, 64).step_s for each in (onebit, overlap))
        assert (MARGIN * one < other) == pays
    assert crossover_rate(profile, coded, (onebit, onebit), 4, 256) is None
