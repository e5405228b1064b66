"""The terms of the cost model: ranks that differ, links by number, NCCL, input and update."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import numpy as np
import pytest

from lab.model.profile import Layer, Profile
from lab.simulate.hardware import PROTOCOLS, Hardware, Link
from lab.simulate.network import Network, slowest_factor
from lab.simulate.step import simulate
from lab.simulate.strategy import CEILING
from tests.support.simulated import FLAT, strategy

NODE = Hardware("node", "made up", "nccl", 8, Link(3.4e-6, 4.5e11), None, math.inf)
LAYER = Layer("fc", 1_000_000, forward_ms=10, backward_ms=20)
PROFILE = Profile("one layer", "made up", reference_batch=8, layers=(LAYER,))


def test_jitter_costs_the_slowest_ranks_share() -> None:
    published = {2: 1.1, 4: 2.0, 8: 2.8, 64: 4.6, 512: 6.0}  # percent of a step, at 2 % jitter
    found = {size: 100 * (slowest_factor(size, 0.02) - 1) for size in published}
    assert found == pytest.approx(published, abs=0.06)
    drawn = np.random.default_rng(0).normal(1, 0.1, (20_000, 16)).max(axis=1)
    assert slowest_factor(16, 0.1) == pytest.approx(float(np.median(drawn)), rel=2e-3)
    assert slowest_factor(1, 0.5) == 1


def test_a_straggler_is_the_slowest_but_jitter_may_exceed_it() -> None:
    assert slowest_factor(8, 0.0, 1, 1.5) == 1.5
    drawn = np.random.default_rng(0).normal(1, 0.1, (20_000, 8))
    drawn[:, 0] *= 1.1
    median = statistics.median(drawn.max(axis=1))
    assert slowest_factor(8, 0.1, 1, 1.1) == pytest.approx(median, rel=3e-3)


def test_compute_waits_for_the_slowest_rank_and_one_rank_for_none() -> None:
    hardware = replace(FLAT, num_slow=1, slow_factor=2.0)
    assert simulate(PROFILE, hardware, CEILING, 1, 8).step_s == pytest.approx(0.03)
    assert simulate(PROFILE, hardware, CEILING, 2, 8).step_s == pytest.approx(0.06)
    transfer_s = 2 * 4e6 / 1e8
    step = simulate(PROFILE, hardware, strategy("tree"), 2, 8)
    assert step.step_s == pytest.approx(0.06 + transfer_s)


def test_nodes_with_links_of_their_own_rates() -> None:
    """Rank 2 has a slow link; 0-1-3 do not wait for it but in a ring."""
    network = Network(replace(FLAT, node_rates=(1e8, 1e8, 1e7, 1e8)), 4)
    whole, slow = 1e6 / 1e8, 1e6 / 1e7
    up = slow + slow  # 3 to 2, beside 1 to 0; then 2 to 0
    assert network.tree(1e6).seconds == pytest.approx(2 * up)
    assert network.star(1e6).seconds == pytest.approx(2 * (whole + slow + whole))
    assert network.ring(1e6).seconds == pytest.approx(2 * 3 / 4 * slow)
    alike = Network(replace(FLAT, node_rates=(1e8,) * 4), 4)
    for name in ("tree", "star", "ring"):
        same = getattr(Network(FLAT, 4), name)(1e6)
        assert getattr(alike, name)(1e6).seconds == pytest.approx(same.seconds)
    with pytest.raises(ValueError, match="has 4 node_rates"):
        Network(replace(FLAT, node_rates=(1e8,) * 4), 5)


def test_a_pair_has_fewer_links_than_a_whole_node() -> None:
    mesh = Link(0.0, 20e9, ((2, 1), (3, 2), (4, 3), (5, 4)))
    assert [mesh.rate_of(size) / 20e9 for size in (1, 2, 3, 4, 8)] == [1, 1, 2, 3, 4]
    assert Link(0.0, 20e9, 8).rate_of(2) == 160e9


@pytest.mark.parametrize("num_nodes", [2, 8, 64])
def test_rings_over_nodes_reach_the_adapters_rate(num_nodes: int) -> None:
    """1 GB on H200: bus bandwidth near 8 x 50 GB/s, not the sum of three phases."""
    nodes = replace(NODE, inter=Link(1.4e-5, 5e10, 8), protocols=tuple(PROTOCOLS))
    size = 8 * num_nodes
    busbw = 2 * (size - 1) / size * 1e9 / Network(nodes, size).all_reduce(1e9).seconds
    assert 300e9 < busbw <= 400e9


def test_small_messages_choose_the_protocol_of_low_latency() -> None:
    one_each = [Network(replace(NODE, protocols=(name,)), 8) for name in PROTOCOLS]
    network = Network(replace(NODE, protocols=tuple(PROTOCOLS)), 8)
    small, large = ([one.all_reduce(n).seconds for one in one_each] for n in (1e3, 1e9))
    assert min(small) == small[0] == network.all_reduce(1e3).seconds
    assert min(large) == large[2] == network.all_reduce(1e9).seconds
    gathered = 7 * 1e8 / 4.5e11 + 7 * 3.4e-6 + PROTOCOLS["Simple"].launch_s
    assert one_each[2].all_gather(1e8).seconds == pytest.approx(gathered)
    assert Network(NODE, 1).all_reduce(1e9).seconds == 0


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_one_rank_casts_nothing(name: str) -> None:
    costly = replace(FLAT, codec_bytes_per_s=1e6)
    alone = simulate(PROFILE, costly, strategy(name), 1, 8).step_s
    assert alone == simulate(PROFILE, costly, CEILING, 1, 8).step_s


def test_update_input_and_overhead_add_to_a_step() -> None:
    base = simulate(PROFILE, FLAT, CEILING, 4, 8).step_s
    node = replace(FLAT, ranks_per_node=4, intra=Link(0.0, 1e9))

    def step_s(**terms: float | int) -> float:
        return simulate(PROFILE, replace(node, **terms), CEILING, 4, 8).step_s

    assert step_s(update_bytes_per_s=1e9) == pytest.approx(base + 5 * 4e6 / 1e9)
    assert step_s(overhead_s=1e-3) == pytest.approx(base + 1e-3)
    assert step_s(update_bytes_per_s=1e9, num_cores=2) == pytest.approx(base + 2 * 5 * 4e6 / 1e9)
    assert step_s(overhead_s_per_rank=1e-3) == pytest.approx(base + 3e-3)
    assert step_s(input_samples_per_s=1e9) == base
    assert step_s(input_samples_per_s=100) == pytest.approx(4 * 8 / 100)
