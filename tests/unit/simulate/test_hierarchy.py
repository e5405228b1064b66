"""The cost card of two levels, against closed forms and against the exchange itself."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from lab.claims.predicted import profile_of
from lab.distributed.comm import Comm, run_ranks
from lab.exchange.bucket import GradBucket
from lab.simulate.costs import Stage, payload_bytes, stages_of
from lab.simulate.hardware import Hardware, Link
from lab.simulate.network import Network
from lab.simulate.step import BucketExchange, LayerCompute, OneThread, simulate
from lab.simulate.strategy import buckets
from tests.support.cases import exchange_settings, maker
from tests.support.simulated import run, strategy

FAST, SLOW = Link(0.0, 1e9), Link(0.0, 1e7)
SHAPES = [(60, 512), (7,), (30, 100)]
NUM_VALUES = sum(map(math.prod, SHAPES))


def nodes(local: int) -> Hardware:
    return Hardware("nodes", "made up", "gloo", local, FAST, SLOW, math.inf)


@pytest.mark.parametrize("exchange", ["hierarchical", "hierarchical_onebit"])
@pytest.mark.parametrize(("local", "size"), [(2, 4), (4, 4), (1, 3), (3, 5)])
def test_bytes_are_those_that_the_exchange_sends(exchange: str, local: int, size: int) -> None:
    """The last node may be smaller: 3 + 2 ranks."""
    make = maker(exchange)
    groups = [list(range(size))[at : at + local] for at in range(0, size, local)]

    def rank_main(comm: Comm) -> int:
        shapes = {str(at): torch.Size(shape) for at, shape in enumerate(SHAPES)}
        make().average(GradBucket(shapes, torch.randn(NUM_VALUES)), comm)
        return comm.traffic.payload_bytes

    expected = payload_bytes(SHAPES, exchange_settings(exchange), Network(nodes(local), size))
    # Lines of messages are filled up.
    assert max(run_ranks(size, rank_main, groups)) == pytest.approx(expected, rel=0.03, abs=512)


@pytest.mark.parametrize(("local", "num_nodes"), [(4, 2), (2, 8)])
def test_time_is_that_of_both_levels_one_after_the_other(local: int, num_nodes: int) -> None:
    network, shape = Network(nodes(local), local * num_nodes), (8 * 1024, 100)
    seconds = [s.seconds for s in stages_of([shape], exchange_settings("hierarchical"), network)]
    num_bytes = 4 * math.prod(shape)
    inside = (local - 1) / local * num_bytes / 1e9
    # All rails together carry the whole gradient over a node's link.
    between = 2 * (num_nodes - 1) / num_nodes * num_bytes / 1e7
    assert sum(seconds) == pytest.approx(2 * inside + between)


def test_a_codec_between_nodes_encodes_a_share_and_decodes_all() -> None:
    hardware = replace(nodes(4), codec_bytes_per_s=1e9)
    flat = replace(hardware, ranks_per_node=1, intra=None)

    def codec_s(name: str, machine: Hardware) -> float:
        stages = stages_of([(4096, 1024)], exchange_settings(name), Network(machine, 8))
        return sum(stage.seconds for stage in stages if stage.row == "codec")

    share = codec_s("hierarchical_onebit", hardware) / codec_s("onebit", flat)
    # Bytes for a value: encoding reads and writes 12, as does a sum of one of N shards; decoding 4.
    assert share == pytest.approx(((12 + 12 / 2) / 4 + 4) / (12 + 12 / 8 + 4), rel=0.03)


def test_adapters_of_a_node_are_shared_by_its_rails() -> None:
    settings, shape = exchange_settings("hierarchical"), (4096, 1024)
    one, eight = (
        Network(replace(nodes(8), inter=replace(SLOW, num_links=links), library="nccl"), 16)
        for links in (1, 8)
    )
    slow, fast = (
        sum(s.seconds for s in stages_of([shape], settings, network) if not s.intra_node)
        for network in (one, eight)
    )
    assert slow == pytest.approx(8 * fast, rel=0.01)


@pytest.mark.parametrize(("inside", "expected_s"), [(True, 4), (False, 6)])
def test_over_gloo_a_bucket_is_inside_while_another_is_between(
    inside: bool, expected_s: int
) -> None:
    stages = [
        Stage("exchange", 1.0, 1, inside),
        Stage("exchange", 1.0, 1),
        Stage("exchange", 1.0, 1, inside),
    ]
    two = [BucketExchange("a", 0, stages), BucketExchange("b", 0, stages)]
    rank = run([LayerCompute("layer", 0.0, 0.0)], two, OneThread(), contention=0.0)
    assert rank.now_s == pytest.approx(expected_s)


def test_a_share_of_a_stage_stays_inside_its_node() -> None:
    """Of zero1's two transfers, or in a round of local_sgd, each stage is scaled."""
    stage = Stage("exchange", 2.0, 8, intra_node=True)
    assert stage.scaled(0.5) == Stage("exchange", 1.0, 4, intra_node=True)


def test_two_levels_overlap_in_a_predicted_step() -> None:
    """Inside the nodes it takes as long as between them: over Gloo half of it is hidden."""
    profile = profile_of("alexnet_titanx", 0.01)
    ways = strategy("hierarchical", "overlap=true", "bucket_mb=0"), strategy("none")
    slow = replace(nodes(2), intra=SLOW)
    with_exchange, without = (simulate(profile, slow, way, 4, 4).step_s for way in ways)
    alone_s = sum(
        stage.seconds
        for bucket in buckets(profile, 0)
        for stage in stages_of(list(bucket.values()), ways[0].exchange, Network(slow, 4))
    )
    assert with_exchange - without < 0.9 * alone_s
