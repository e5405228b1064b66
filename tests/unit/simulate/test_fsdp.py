"""FSDP2's steps and ZeRO++'s parts, against closed forms and what the sync itself counts."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch
import yaml

from lab.claims.predicted import profile_of
from lab.distributed.torch_comm import TorchComm
from lab.distributed.worker import InlineWorker
from lab.model.replay import Replay
from lab.settings.config import build, load
from lab.simulate.costs import Stage
from lab.simulate.fsdp import Sharded, Unit, costs_of_units, units_of
from lab.simulate.hardware import Hardware, Link
from lab.simulate.network import Network
from lab.simulate.step import LayerCompute, Rank, simulate
from lab.simulate.strategy import Strategy
from lab.sync.base import SyncParts
from lab.sync.fsdp_units import units
from tests.support.process_groups import run_ranks
from tests.support.simulated import FLAT, strategy
from tests.support.slow import some_of

PROFILE = profile_of("alexnet_titanx", 0.01)


def nodes(per_host: int, codec_bytes_per_s: float = math.inf) -> Hardware:
    links = Link(0.0, 1e9), Link(0.0, 1e7)
    return Hardware("nodes", "made up", "gloo", per_host, *links, codec_bytes_per_s)


@pytest.mark.parametrize("bucket_mb", [25, 300, 0.1, None])
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
    whole = PROFILE.scaled(100)
    step = simulate(whole, FLAT, strategy(*settings.split()), 4, 64)
    # Layers below 1 MiB, a thousandth of the model, are gathered once; rows are filled up.
    assert step.payload_bytes == pytest.approx(factor * 3 / 4 * whole.gradient_bytes, rel=0.01)


def test_copies_of_the_weights_add_an_all_reduce_between_nodes() -> None:
    step = simulate(PROFILE, nodes(2), strategy("hsdp"), 4, 64)
    num_bytes = PROFILE.gradient_bytes
    within, between = 4 / 2 * num_bytes, 2 * 1 / 2 * num_bytes / 2
    assert step.payload_bytes == pytest.approx(within + between, rel=0.03)
    exposed_s = step.step_s - simulate(PROFILE, nodes(2), strategy("none"), 4, 64).step_s
    # Both ranks of a node send their halves over its link.
    assert exposed_s == pytest.approx(within / 1e9 + 2 * between / 1e7, rel=0.03)


def test_an_exchange_without_a_reduce_scatter_is_refused() -> None:
    with pytest.raises(ValueError, match="exchange=PowerSGD has no reduce-scatter"):
        strategy("fsdp", "sync.reduce_scatter=lab", "exchange=powersgd")


# Three layers of 1 s forward and 2 s backward, a unit each; gathers and scatters take 1 s.
LAYERS = [LayerCompute(name, 1.0, 2.0) for name in "abc"]
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
    linked = replace(nodes(4), library="nccl", inter=link)
    network = Network(linked, 16)
    for stride, size, local, width in ((4, 4, 1, 0.5), (2, 8, 2, 1.0), (8, 2, 1, 0.5)):
        across = network.inter_node(stride)
        assert (across.size, across.local) == (size, local)
        assert across.inter.bandwidth_bytes_per_s == width * 1e9
    slow = Network(replace(linked, node_rates=(1e9, 1e9, 1e8, 1e9)), 16).inter_node(8)
    assert slow.rates == (0.5 * 1e8, 0.5 * 1e8)  # the groups of the slowest node count


QWZ, HPZ = "sync.all_gather=int8", "sync.reshard=node"
CODEC = "exchange=int4 exchange.block_size=256 exchange.error_feedback=false"
QGZ = f"sync.reduce_scatter=two_levels {CODEC}"
PARTS = {
    "fsdp": "fsdp",
    "hsdp": "hsdp sync.shard_size=2",
    "qwZ": f"fsdp {QWZ}",
    "hpZ": f"fsdp {HPZ}",
    "qgZ": f"fsdp {QGZ}",
    "one level": "fsdp sync.reduce_scatter=lab exchange=int4",
    "zeropp": "zeropp",
}
PLACES = [(2, 2), (1, 2), (2, 3), (3, 2)]  # hosts, and ranks on each
CASES = [(name, *place) for name in PARTS for place in PLACES]
CASES.remove(("hsdp", 2, 3))  # its pairs of ranks would lie across hosts


def parts_of(name: str) -> Strategy:
    return strategy(*PARTS[name].split())


def step_of(settings: str, hosts: int, per_host: int) -> list[tuple[int, int]]:
    """Return what each rank counts in a step: bytes, and those of them to other hosts."""
    config, profile = load(f"strategy={settings}".split()), yaml.safe_load(PROFILE.to_yaml())

    def rank_main(comm: TorchComm) -> tuple[int, int]:
        model = Replay(profile=profile, input_shape=[8], output_size=2, time_scale=1e-3)
        exchange, worker = build(config.exchange), InlineWorker()
        parts = SyncParts(model, model, exchange, comm, worker, True, config.bucket_mb)
        sync = build(config.sync, parts)
        with sync.micro_batch(last=True):
            sync.module(torch.ones(1, 8)).sum().backward()
        sync.finish()
        return comm.traffic.payload_bytes, comm.traffic.across_bytes

    return run_ranks(hosts, per_host, rank_main)


@pytest.mark.parametrize(("name", "hosts", "per_host"), some_of(CASES, every=14))
def test_bytes_are_those_that_the_sync_counts(name: str, hosts: int, per_host: int) -> None:
    size = hosts * per_host
    step = simulate(PROFILE, nodes(per_host), parts_of(name), size, 64)
    counted = step_of(PARTS[name], hosts, per_host)
    of_hosts = [counted[at : at + per_host] for at in range(0, size, per_host)]
    across = max(sum(crossed for _, crossed in host) for host in of_hosts)
    assert step.payload_bytes == pytest.approx(max(sent for sent, _ in counted), rel=1e-4)
    assert step.across_bytes == pytest.approx(across, rel=1e-4)


BYTE, HALF = 1032 / 4096, 136 / 1024  # of a value's four bytes, with the header of its block


@pytest.mark.parametrize(
    ("name", "share"),
    [
        ("fsdp", 3 / 4 + 3 / 4 + 6 / 4),  # two gathers, and an all-reduce over Gloo
        ("qwZ", BYTE * (3 / 4 + 3 / 4) + 6 / 4),
        ("hpZ", 3 / 4 + 6 / 4),
        ("qgZ", 3 / 4 + 3 / 4 + HALF / 2),
        ("zeropp", BYTE * 3 / 4 + HALF / 2),
    ],
)
def test_bytes_to_the_other_host_have_closed_forms(name: str, share: float) -> None:
    whole = PROFILE.scaled(100)
    step = simulate(whole, nodes(2), parts_of(name), 4, 64)
    # Layers below 1 MiB, a thousandth of the model, are gathered once.
    assert step.across_bytes / whole.gradient_bytes == pytest.approx(share, rel=0.002)


def test_codecs_take_their_time_and_second_shards_stay_inside() -> None:
    first, *_ = costs_of_units(PROFILE.scaled(100), parts_of("zeropp"), Network(nodes(2, 1e9), 4))
    n = first.gather[-2].seconds * 1e9 / (4 + BYTE * 4)  # values that are decoded
    encoded = first.gather[0].seconds * 1e9
    assert encoded == pytest.approx((4 + BYTE * 4) * n / 4, rel=0.01)
    assert [(s.row, s.intra_node, s.across_bytes) for s in first.again] == [
        ("exchange", True, 0),
        ("codec", False, 0),
    ]
    four_bits = sum(s.seconds for s in first.scatter if s.codec == "Int4")
    # Each is encoded and half of them decoded inside a host, then half as many between hosts.
    encoding, decoding = 4 + 4 * HALF, 4 / 2 + 4 * HALF
    assert four_bits == pytest.approx(1.5 * (encoding + decoding) * n / 1e9, rel=0.01)
    wires = [(s.intra_node, s.across_bytes > 0) for s in first.scatter if s.row == "exchange"]
    assert wires == [(True, False), (False, True)]


@pytest.mark.parametrize(
    ("settings", "per_host", "size", "message"),
    [
        ("sync.shard_size=3", 2, 4, "sync.shard_size=3: must be node, null, or a divisor of the 4"),
        (HPZ, 2, 5, "sync.reshard=node: 5 ranks cannot be divided into nodes of 2"),
        (HPZ, 1, 4, "sync.reshard=node: each rank would store all weights"),
        ("sync.reshard=3", 2, 4, "sync.reshard=3: must be node, null, or a divisor of the 4 ranks"),
        (f"{HPZ} sync.shard_size=2", 2, 4, "sync.reshard=node: sync.shard_size=2 already gathers"),
        (QGZ, 2, 5, "sync.reduce_scatter=two_levels: 5 ranks cannot be divided"),
        (f"{QGZ[:-5]}true", 2, 4, "exchange.error_feedback=true: sync.reduce_scatter=two_levels"),
        ("sync.all_gather=int4", 2, 4, "sync.all_gather=int4: allowed: torch, int8"),
    ],
)
def test_what_training_refuses_has_no_prediction(
    settings: str, per_host: int, size: int, message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        simulate(PROFILE, nodes(per_host), strategy("fsdp", *settings.split()), size, 64)
