"""FSDP2's steps: units, bytes and what is hidden, against closed forms and the replayed model."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import yaml

from lab.claims.predicted import profile_of
from lab.model.replay import Replay
from lab.simulate.costs import Stage
from lab.simulate.fsdp import Sharded, Unit, units_of
from lab.simulate.hardware import Hardware, Link
from lab.simulate.network import Network
from lab.simulate.step import Compute, Rank, simulate
from lab.sync.fsdp_units import units
from tests.support.simulated import FLAT, strategy

PROFILE = profile_of("alexnet_titanx", 0.01)


@pytest.mark.parametrize("bucket_mb", [25, 150, 300, 0.1, None])
def test_units_are_those_of_the_replayed_model(bucket_mb: float | None) -> None:
    profile = yaml.safe_load(PROFILE.to_yaml())
    model = Replay(profile=profile, input_shape=[8], output_size=2)
    names = {id(p): name.removeprefix("layers.") for name, p in model.named_parameters()}
    taken, expected = set[int](), list[set[str]]()
    for unit in units(model, bucket_mb, model.bytes_scale):  # inner before outer
        own = {id(p) for p in unit.parameters()} - taken
        expected.append({names[key] for key in own})
        taken |= own
    assert [set(unit) for unit in units_of(PROFILE, bucket_mb)] == expected


@pytest.mark.parametrize(
    ("settings", "factor"),
    [
        ("fsdp", 2 + 2),  # gathered twice, and torch's reduce-scatter over Gloo sends twice
        ("fsdp sync.reduce_scatter=lab exchange=allreduce", 2 + 1),
        ("fsdp sync.reduce_scatter=lab exchange=bf16", 2 + 0.5),
        ("fsdp sync.reduce_scatter=lab exchange=int8", 2 + (1 + 8 / 1024) / 4),
        ("fsdp accumulate=2", 2 * 2 + 2),
    ],
)
def test_bytes_are_those_of_each_collective(settings: str, factor: float) -> None:
    name, *more = settings.split()
    whole = PROFILE.scaled(100)
    step = simulate(whole, FLAT, strategy(name, *more), 4, 64)
    # Layers below 1 MiB, a thousandth of the model, are gathered once; rows are filled up.
    assert step.payload_bytes == pytest.approx(factor * 3 / 4 * whole.gradient_bytes, rel=0.01)


def test_copies_of_the_weights_add_an_all_reduce_between_nodes() -> None:
    nodes = Hardware("nodes", "made up", "gloo", 2, Link(0, 1e9), Link(0, 1e7), math.inf)
    step = simulate(PROFILE, nodes, strategy("hsdp"), 4, 64)
    num_bytes = PROFILE.gradient_bytes
    within, between = 4 / 2 * num_bytes, 2 * 1 / 2 * num_bytes / 2
    assert step.payload_bytes == pytest.approx(within + between, rel=0.03)
    exposed_s = step.step_s - simulate(PROFILE, nodes, strategy("none"), 4, 64).step_s
    # Both ranks of a node send their halves over its link.
    assert exposed_s == pytest.approx(within / 1e9 + 2 * between / 1e7, rel=0.03)


def test_copies_must_divide_the_ranks() -> None:
    with pytest.raises(ValueError, match=r"sync\.shard_size=3: must be node, null, or a divisor"):
        simulate(PROFILE, FLAT, strategy("fsdp", "sync.shard_size=3"), 4, 64)


def test_an_exchange_without_a_reduce_scatter_is_refused() -> None:
    with pytest.raises(ValueError, match="exchange=PowerSGD: has no reduce-scatter"):
        strategy("fsdp", "sync.reduce_scatter=lab", "exchange=powersgd")


# Three layers of 1 s forward and 2 s backward, a unit each; gathers and scatters take 1 s.
LAYERS = [Compute(name, 1.0, 2.0) for name in "abc"]
WIRE, PACK = Stage("exchange", 1.0), Stage("codec", 0.0)
UNITS = [
    Unit(layer.name, range(at, at + 1), [WIRE, PACK], [WIRE, PACK], [PACK, WIRE])
    for at, layer in enumerate(LAYERS)
]


@pytest.mark.parametrize(("blocks", "expected_s"), [(True, 9 + 3 + 3 + 3), (False, 9 + 1 + 1 + 1)])
def test_gathers_hide_behind_the_unit_before_unless_they_block(
    blocks: bool, expected_s: float
) -> None:
    """The first gather of each pass has nothing to hide behind, and the last scatter neither."""
    rank = Rank(contention=0.0)
    Sharded(LAYERS, [*UNITS, Unit("", range(0))], rank, blocks).run(1)
    assert rank.now_s == pytest.approx(expected_s)


def test_a_rank_of_each_node_shares_the_nodes_links_with_the_others() -> None:
    link = Link(0, 1e9, num_links=2)
    nodes = Hardware("nodes", "made up", "nccl", 4, Link(0, 1e10), link, math.inf)
    network = Network(nodes, 16)
    for stride, size, local, width in ((4, 4, 1, 0.5), (2, 8, 2, 1.0), (8, 2, 1, 0.5)):
        across = network.across(stride)
        assert (across.size, across.local) == (size, local)
        assert across.inter.bandwidth_bytes_per_s == width * 1e9
    slow = Network(replace(nodes, node_rates=(1e9, 1e9, 1e8, 1e9)), 16).across(8)
    assert slow.rates == (0.5 * 1e8, 0.5 * 1e8)  # the groups of the slowest node count
