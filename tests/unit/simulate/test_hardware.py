"""Hardware: its files and links, NCCL, a GPU's host, and the terms that depend on these."""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lab.claims.predicted import MARGIN, Predicted, crossover_batch, crossover_rate, profile_of
from lab.cluster.settings import Cluster, LinkChange
from lab.model.profile import Layer, Profile
from lab.settings.errors import ConfigError
from lab.settings.files import choices_of, conf_dir, read_file
from lab.simulate.fit import over_links
from lab.simulate.hardware import (
    PROTOCOLS,
    Hardware,
    Host,
    Link,
    parse,
    uncertainty_samples,
    with_rate,
)
from lab.simulate.network import Network, slowest_factor
from lab.simulate.step import predict, simulate, stages_of_step
from lab.simulate.strategy import CEILING
from lab.simulate.terms import as_fitted, interval, reach
from lab.simulate.view import values_of
from tests.support.simulated import FLAT, strategy

NODE: dict[str, Any] = {
    "name": "made_up",
    "source": "this test",
    "library": "nccl",
    "ranks_per_node": 4,
    "intra": {"latency_s": 1e-5, "bandwidth_bytes_per_s": 1e9, "num_links": {2: 1, 4: 3}},
    "inter": None,
    "codec_bytes_per_s": 1e9,
    "contention": 0.1,
    "assumed": {"intra.bandwidth_bytes_per_s": [1e8, 1e10], "contention": [0, 0.2]},
}
H200 = {"name": "NVIDIA H200"}


def test_draws_cover_the_ranges_and_are_the_same_each_time() -> None:
    hardware = parse(NODE)
    drawn = list(uncertainty_samples(hardware, 400))
    rates = sorted(each.intra.bandwidth_bytes_per_s for each in drawn if each.intra)
    assert 1e8 <= rates[0] < 1.2e8 and 0.8e10 < rates[-1] <= 1e10
    assert rates[200] == pytest.approx(1e9, rel=0.3)  # even in the logarithm
    assert {each.codec_bytes_per_s for each in drawn} == {1e9}
    assert all(0 <= each.contention <= 0.2 for each in drawn)
    assert drawn == list(uncertainty_samples(hardware, 400))


@pytest.mark.parametrize("name", choices_of("hardware"))
def test_every_figure_said_to_be_assumed_has_a_range(name: str) -> None:
    hardware = parse(read_file("hardware", name))
    assert hardware.name == name and hardware.source
    text = (conf_dir() / f"hardware/{name}.yaml").read_text().splitlines()
    marked = {line.split(":")[0].strip() for line in text if "# assumed" in line}
    ranges = {each.key.rpartition(".")[2] for each in hardware.assumed}
    assert marked - {"library"} <= ranges
    assert all(math.isfinite(each.high) for each in hardware.assumed) and hardware.assumed
    if hardware.library == "nccl":
        assert {"codec_s", "codec_bytes_per_s"} <= ranges
    if device := hardware.device:
        assert device.bandwidth_bytes_per_s > 0
        assert dict(device.peak_flops_per_s).keys() >= {"fp32"} or device.num_threads == 1
    else:
        assert name == "wan100m"


def test_a_file_may_give_only_what_differs_from_a_sibling(tmp_path: Path) -> None:
    own = "name: mine\ninter:\n  bandwidth_bytes_per_s: 1e9\nmemory_bytes: 1e9\n"
    (tmp_path / "hardware").mkdir()
    (tmp_path / "hardware/mine.yaml").write_text(f"defaults: a100x8_hdr\n{own}")
    mine = parse(read_file("hardware", "mine", str(tmp_path)))
    theirs = parse(read_file("hardware", "a100x8_hdr"))
    assert theirs.inter and mine.inter == replace(theirs.inter, bandwidth_bytes_per_s=1e9)
    # What a file gives is not assumed; all else is as its sibling has it.
    assumed = tuple(r for r in theirs.assumed if r.key != "inter.bandwidth_bytes_per_s")
    assert len(assumed) < len(theirs.assumed)
    assert mine == replace(theirs, name="mine", inter=mine.inter, memory_bytes=1e9, assumed=assumed)
    (tmp_path / "hardware/mine.yaml").write_text(f"defaults: mine\n{own}")
    with pytest.raises(ConfigError, match="^hardware=mine: defaults=mine: must not lead back"):
        read_file("hardware", "mine", str(tmp_path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"assumed": {"contention": [0.2, 0.3]}},
            "assumed.contention=.* does not contain its value 0.1",
        ),
        ({"assumed": {"speed": [1, 2]}}, "speed"),
        ({"assumed": {"contention": [1]}}, r"=\[1\]: must be \[lowest, highest\]"),
        ({"assumed": {"inter.latency_s": [0, 1]}}, "latency_s"),
        ({"protocols": ["LL64"]}, "protocols=.*must be one or more of LL, LL128, Simple"),
        ({"node_rates": [0]}, "node_rates=0: must be a number of at least 1"),
        ({"colour": 3}, "colour=3: no such key; allowed: name, source, library"),
        ({"intra": {**NODE["intra"], "delay": 3}}, "intra.delay=3: no such key; allowed: lat"),
        ({"intra": {"latency_s": 1e-6}}, "intra.bandwidth_bytes_per_s: is missing"),
        ({"inter": "mine"}, "inter: must have the keys latency_s, bandwidth_bytes_per_s"),
        ({"node_rates": 3}, "node_rates=3: must be a list"),
        ({"num_slow": 1.5}, "num_slow=1.5: must be an integer of at least 0"),
        ({"assumed": {"ranks_per_node": [1, 9]}}, "assumed.ranks_per_node: must be the key of a"),
        ({"assumed": {"name": [1, 9]}}, "assumed.name: must be the key of a number"),
        ({"assumed": 3}, r"assumed=3: must map keys to \[lowest, highest\]"),
        ({"jitter": -1}, "jitter=-1: must be a number from 0 to 1000"),
        ({"intra": {**NODE["intra"], "num_links": {4: 3}}}, "num_links=.*must begin with 2 ranks"),
        ({"nccl": "turing"}, "nccl=turing: allowed: volta, ampere, hopper"),
        ({"host": {"speed": 1}}, "host.speed=1: no such key; allowed: kernel_s"),
        ({"host": {"kernel_s": -1}}, "host.kernel_s=-1: must be a number from 0 to 1000000"),
        ({"device": 3}, "device: must have the keys name, source, peak"),
        ({"device": H200 | {"speed": 1}}, "device.speed=1: no such key; allowed: name,"),
        ({"device": {"name": "abacus"}}, "device.name=abacus is not in lab/measure/peaks.py"),
        (
            {"device": H200 | {"compute_efficiency": 0}},
            "device.compute_efficiency=0: must be a number of at least 0.001",
        ),
        (
            {"device": H200 | {"peak_flops_per_s": {"fp64": 1e12}}},
            "device.peak_flops_per_s=fp64: allowed: fp32, tf32, bf16, fp16",
        ),
        ({"device": H200 | {"op_rates": [1]}}, r"device.op_rates=\[1\]: must map names to values"),
    ],
)
def test_a_wrong_figure_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(NODE | change)


NCCL_NODE = Hardware("node", "made up", "nccl", 8, Link(3.4e-6, 4.5e11), None, math.inf)
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
    with pytest.raises(ValueError, match="has node_rates for only 4 nodes"):
        Network(replace(FLAT, node_rates=(1e8,) * 4), 5)


def test_a_pair_has_fewer_links_than_a_whole_node() -> None:
    mesh = Link(0.0, 20e9, ((2, 1), (3, 2), (4, 3), (5, 4)))
    assert [mesh.rate_of(size) / 20e9 for size in (1, 2, 3, 4, 8)] == [1, 1, 2, 3, 4]
    assert Link(0.0, 20e9, 8).rate_of(2) == 160e9


@pytest.mark.parametrize("num_nodes", [2, 8, 64])
def test_rings_over_nodes_reach_the_adapters_rate(num_nodes: int) -> None:
    """1 GB on H200: bus bandwidth near 8 x 50 GB/s, not the sum of three phases."""
    nodes = replace(NCCL_NODE, inter=Link(1.4e-5, 5e10, 8), protocols=tuple(PROTOCOLS))
    size = 8 * num_nodes
    busbw = 2 * (size - 1) / size * 1e9 / Network(nodes, size).all_reduce(1e9).seconds
    assert 300e9 < busbw <= 400e9


def test_small_messages_choose_the_protocol_of_low_latency() -> None:
    one_each = [Network(replace(NCCL_NODE, protocols=(name,)), 8) for name in PROTOCOLS]
    network = Network(replace(NCCL_NODE, protocols=tuple(PROTOCOLS)), 8)
    small, large = ([one.all_reduce(n).seconds for one in one_each] for n in (1e3, 1e9))
    assert min(small) == small[0] == network.all_reduce(1e3).seconds
    assert min(large) == large[2] == network.all_reduce(1e9).seconds
    gathered = 7 * 1e8 / 4.5e11 + 7 * 3.4e-6 + PROTOCOLS["Simple"].launch_s
    assert one_each[2].all_gather(1e8).seconds == pytest.approx(gathered)
    assert Network(NCCL_NODE, 1).all_reduce(1e9).seconds == 0


def test_one_rank_casts_nothing() -> None:
    costly = replace(FLAT, codec_bytes_per_s=1e6)
    alone = simulate(PROFILE, costly, strategy("bf16"), 1, 8).step_s
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
        (Cluster(1, (None, None)), "cluster.rates: every link needs a rate"),
        (replace(GIGABIT, loss_percent=1.0), "cluster.loss_percent"),
        (replace(GIGABIT, changes=(LinkChange(1.0, 0, "down"),)), "cluster.changes"),
    ],
)
def test_what_has_no_cost_model_is_refused(other: Cluster, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        over_links(FITTED, GIGABIT, other)


def test_a_fit_that_starts_from_another_one_lists_each_value_once() -> None:
    keys = ("inter.latency_s", "contention")
    twice = as_fitted(as_fitted(replace(FLAT, contention=0.5), keys), keys)
    assert values_of(asdict(twice)) == "latency_s=0, contention=0.5"


def test_crossings() -> None:
    profile = profile_of("alexnet_titanx", 0.02)
    tree, onebit, overlap = map(strategy, ("tree", "onebit", "overlap"))
    predicted = Predicted("alexnet_titanx", FLAT, 0.02)
    batch_size = crossover_batch(predicted, "tree", 4)
    assert batch_size and batch_size % 4 == 0
    pays = {b: predict(profile, FLAT, tree, 4, b).speedup > 1 for b in (batch_size - 4, batch_size)}
    assert pays == {batch_size - 4: False, batch_size: True}
    endless = replace(FLAT, inter=Link(0.0, 1.0))
    assert crossover_batch(replace(predicted, hardware=endless), "tree", 4) is None
    coded = replace(FLAT, codec_bytes_per_s=1e10)
    on_coded = replace(predicted, hardware=coded)
    rate = crossover_rate(on_coded, ("onebit", "overlap"), 4, 256)
    assert rate
    for factor, pays in ((0.9, True), (1.1, False)):
        links = with_rate(coded, factor * rate)
        one, other = (simulate(profile, links, each, 4, 64).step_s for each in (onebit, overlap))
        assert (MARGIN * one < other) == pays
    assert crossover_rate(on_coded, ("onebit", "onebit"), 4, 256) is None


LARGE = Layer("fc", 2_000_000, forward_ms=10, backward_ms=20)
LAUNCHED = Profile("one layer", "made up", 8, (LARGE,), num_kernels=100)


def step_s(hardware: Hardware, name: str, size: int, **changes: int) -> float:
    way = replace(CEILING if name == "none" else strategy(name, "transform=none"), **changes)
    return simulate(LAUNCHED, hardware, way, size, 8).step_s


@pytest.mark.parametrize("size", [1, 8])
def test_a_step_is_never_shorter_than_its_host(size: int) -> None:
    """Each kernel, hook, bucket and call of a codec costs the host; a fast host costs nothing."""
    host = Host(kernel_s=1e-3, parameter_s=1e-2, bucket_s=2e-2, codec_s=3e-2)
    slow = replace(NCCL_NODE, host=host)
    assert step_s(slow, "none", size) == pytest.approx(0.1)
    assert step_s(slow, "overlap", size) == pytest.approx(0.1 + 1e-2 + 2e-2)
    assert step_s(slow, "onebit", size) == pytest.approx(0.1 + 1e-2 + 2e-2 + 3 * 3e-2)
    fast = replace(NCCL_NODE, host=Host(kernel_s=1e-5))
    for name in ("none", "overlap", "onebit"):
        assert step_s(fast, name, size) == step_s(NCCL_NODE, name, size)


def test_each_micro_batch_is_launched() -> None:
    slow = replace(NCCL_NODE, host=Host(kernel_s=1e-3))
    assert step_s(slow, "none", 1, accumulate=4) == pytest.approx(0.4)


def test_a_codec_on_the_device_delays_its_compute() -> None:
    """Beside it, an H100's added 1.2 ms to a step of 26 that could have hidden them."""
    codec = replace(NCCL_NODE, codec_bytes_per_s=1e10)
    way = strategy("onebit", "transform=none")
    stages = stages_of_step(LAUNCHED, way, Network(codec, 8))
    codec_s = sum(stage.seconds for stage in stages if stage.row == "codec")
    alone_s = step_s(codec, "onebit", 8)
    filled = replace(codec, codec_contention=1.0)
    assert step_s(filled, "onebit", 8) == pytest.approx(alone_s)  # one bucket hides nothing

    layers = (LARGE, replace(LARGE, name="fc2", backward_ms=200))
    two = replace(LAUNCHED, layers=(replace(LARGE, name="first"), *layers[1:]))
    hidden, delayed = (simulate(two, each, way, 8, 8).step_s for each in (codec, filled))
    assert hidden < delayed <= hidden + 2 * codec_s


def test_open_terms_are_drawn() -> None:
    hardware = parse(read_file("hardware", "h100_x8"))
    found = {each.host.codec_s for each in uncertainty_samples(hardware) if each.host}
    assert len(found) > 30 and 1e-5 <= min(found) < max(found) <= 1e-4


def test_what_can_only_be_worse_makes_no_better_end_of_an_interval() -> None:
    both, worse = [8.0, 12.5], [8.0, 8.0]
    low, high = interval(10.0, both, 0.0, 0.95)
    assert low * high == pytest.approx(100)
    own = interval(10.0, worse, 0.0, 0.95)
    assert own[0] == pytest.approx(low) and own[1] == 10.0
    wide = interval(10.0, worse, 0.1, 0.95)
    assert wide[0] < own[0] and wide[1] == pytest.approx(reach(10.0, 0.1, 0.95)[1])
