"""The cost model, the event simulation and lab.predict."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from lab import predict as command
from lab.claims.predicted import profile_of
from lab.draw.chart import drawn
from lab.exchange import bucket, grouping
from lab.exchange.grouping import in_order_node
from lab.measure import Span
from lab.model.alexnet import alexnet_small
from lab.model.profile import Profile
from lab.record.trace import read_trace
from lab.settings.config import FIELDS
from lab.settings.files import read_file
from lab.simulate.costs import Load, Stage, longest_phase, stages_of
from lab.simulate.fit import fit, fit_result
from lab.simulate.hardware import PROTOCOLS, Link, slowest, with_rate
from lab.simulate.ineffective import INSTEAD
from lab.simulate.network import Network
from lab.simulate.predict import read
from lab.simulate.score import Observation
from lab.simulate.step import (
    Beside,
    BucketExchange,
    LayerCompute,
    OneThread,
    Rank,
    Step,
    predict,
    simulate,
    stages_of_step,
)
from lab.simulate.strategy import CEILING, Strategy
from lab.simulate.view import HEADER, chart
from lab.study.grid import OF_SWEEP
from lab.sync.pattern import gradsync
from tests.conftest import ROOT
from tests.support.cases import ALL_STRATEGIES, EXCHANGES, LIBRARIES, exchange_settings
from tests.support.commands import refusal, said
from tests.support.simulated import FLAT, LINKED, TRUE, leave_study, run, strategy
from tests.support.slow import some_of
from tests.support.svg import overlapping

# Libraries keep a schedule of their own, and `none` exchanges nothing.
SIMULATED = [name for name in ALL_STRATEGIES if name not in (*LIBRARIES, "none")]
pytestmark = pytest.mark.xdist_group("simulate")  # shares strategies, whose composing takes longest


@pytest.fixture(scope="module")
def strategies() -> dict[str, Strategy]:
    rewrites = [name for name in SIMULATED if name.startswith("fc1x1")]  # the model, too
    others = ("none", *(name for name in SIMULATED if name not in rewrites))
    whole = {name: strategy(name) for name in others}
    return whole | {name: strategy(name, "transform=none") for name in rewrites}


@pytest.fixture(scope="module")
def profile() -> Profile:
    return profile_of("alexnet_titanx", 0.02)


def test_onebit_has_three_calls_a_bucket(strategies: dict[str, Strategy]) -> None:
    counting = Network(replace(FLAT, codec_s=1.0), 2)
    shapes = [(2048, 1024), (7,), (64, 3, 11, 11)]
    stages = stages_of(shapes, strategies["onebit"].exchange, counting)
    assert sum(stage.seconds for stage in stages if stage.row == "codec") == 3


@pytest.mark.parametrize("size", [1, 3, 1024])
def test_a_blocking_tree_is_the_closed_form(
    size: int, profile: Profile, strategies: dict[str, Strategy]
) -> None:
    transfer_s = profile.gradient_bytes / 1e8
    step = simulate(profile, FLAT, strategies["tree"], size, 64)
    hops = 2 * math.ceil(math.log2(size))
    assert step.step_s == pytest.approx(profile.compute_s(64) + hops * transfer_s, rel=1e-9)


def test_a_tree_over_nodes_crosses_the_fabric_as_often_as_nodes_halve() -> None:
    node, fabric = Link(1e-5, 1e10), Link(1e-4, 1e8)
    hardware = replace(FLAT, ranks_per_node=4, intra=node, inter=fabric)
    inside, across = node.seconds(1e6), fabric.seconds(1e6)
    assert Network(hardware, 32).tree(1e6).seconds == pytest.approx(2 * (2 * inside + 3 * across))
    assert Network(hardware, 4).tree(1e6).seconds == pytest.approx(2 * 2 * inside)


def test_a_tree_over_nodes_of_three_ranks_crosses_the_fabric_in_its_first_hop() -> None:
    """Rank 3, of the second node, sends to rank 2, and this to rank 0; then rank 4 to rank 0."""
    node, fabric = Link(1e-5, 1e10), Link(1e-4, 1e8)
    hardware = replace(FLAT, ranks_per_node=3, intra=node, inter=fabric)
    inside, across = node.seconds(1e6), fabric.seconds(1e6)
    assert Network(hardware, 6).tree(1e6).seconds == pytest.approx(2 * (2 * across + inside))


def test_nccl_is_as_fast_as_the_slowest_stretch_of_its_ring() -> None:
    hardware = replace(
        FLAT, library="nccl", ranks_per_node=8, intra=Link(0, 1e10), inter=Link(0, 1e8, 4)
    )
    ring = 2 * 31 / 32 * 1e6 / 4e8  # pieces pass all links at once, so the slowest rate decides
    cost = Network(hardware, 32).all_reduce(1e6)
    assert cost.seconds == pytest.approx(ring + PROTOCOLS["Simple"].launch_s)
    assert cost.payload_bytes == pytest.approx(2 * 31 / 32 * 1e6)


def test_a_ring_is_as_slow_as_its_slowest_link_wherever_that_is() -> None:
    hardware = replace(FLAT, ranks_per_node=4, intra=Link(0.0, 1e8), inter=Link(0.0, 5e8))
    for size in (4, 8, 12):
        expected_s = 2 * (size - 1) / size * 1e6 / 1e8
        assert Network(hardware, size).ring(1e6).seconds == pytest.approx(expected_s)
        assert Network(hardware, size).all_gather(1e6 / size).seconds == pytest.approx(
            expected_s / 2
        )


@pytest.mark.parametrize("generation", [None, "volta"])
def test_a_gather_carries_the_same_bytes_to_a_node_that_is_not_full(generation: str | None) -> None:
    node, fabric = Link(0.0, 1e11), Link(0.0, 1e9)
    hardware = replace(FLAT, library="nccl", ranks_per_node=4, intra=node, inter=fabric)
    network = [Network(replace(hardware, nccl=generation), size) for size in (5, 8)]
    part, full = (each.all_gather(1e9 / each.size).seconds for each in network)
    assert part == pytest.approx(full, rel=0.1)


@pytest.mark.parametrize(("library", "chunk_mb"), [("gloo", 4), ("nccl", 32)])
def test_chunks_are_those_of_the_hardwares_library(library: str, chunk_mb: int) -> None:
    network = Network(replace(FLAT, library=library), 4)
    by_library, load = strategy("ring").exchange["chunk_mb"], Load([(10,)], "Ring", network)
    assert load.chunk_bytes(by_library) == chunk_mb * grouping.MIB
    assert load.chunk_bytes(8) == 8 * grouping.MIB


def test_the_end_of_a_message_shares_the_link_of_a_parent_with_the_next_message() -> None:
    buffered = replace(FLAT, inter=Link(0.0, 1e8), send_buffer_bytes=5e5)
    for size, levels in ((2, 0), (3, 0), (4, 1), (7, 1), (8, 2)):
        for num_bytes, shared_s in ((1e7, 5e-3), (2e5, 2e-3)):
            plain = Network(replace(buffered, send_buffer_bytes=0.0), size).tree(num_bytes)
            shared = Network(buffered, size).tree(num_bytes)
            assert shared.seconds - plain.seconds == pytest.approx(levels * shared_s)


@pytest.mark.parametrize("size", [2, 3, 5, 64])
def test_the_busiest_rank_of_the_double_tree(size: int) -> None:
    busiest = max(
        sum(
            len(node.children) + (node.parent is not None)
            for node in (in_order_node(rank, size, tree) for tree in (0, 1))
        )
        for rank in range(size)
    )
    assert Network(FLAT, size).tree_double(1e6, 1e4).payload_bytes == pytest.approx(
        busiest / 2 * 1e6
    )


def test_a_message_pays_alpha_each_time(profile: Profile) -> None:
    slow = replace(FLAT, inter=Link(0.5, 1e20))
    for bucket_mb, messages in (("null", 1), ("0", len(profile.layers))):
        one = strategy("allreduce", f"bucket_mb={bucket_mb}")
        exposed_s = predict(profile, slow, one, 2, 128).exposed_s
        assert exposed_s == pytest.approx(messages * 2 * 0.5, rel=1e-6)


@pytest.mark.parametrize("library", some_of(["gloo", "nccl"], every=3))
@pytest.mark.parametrize("name", SIMULATED)
def test_overlap_is_never_worse_than_blocking(
    name: str, library: str, profile: Profile, strategies: dict[str, Strategy]
) -> None:
    hardware = replace(FLAT, library=library, codec_bytes_per_s=1e10)
    for bucket_mb in (None, 0.0, 1.0, 25.0):
        blocking = replace(strategies[name], bucket_mb=bucket_mb, pattern=gradsync(overlap=False))
        overlapped = replace(blocking, pattern=gradsync(overlap=True))
        for batch_size in (16, 64, 256):
            slow = simulate(profile, hardware, blocking, 4, batch_size).step_s
            fast = simulate(profile, hardware, overlapped, 4, batch_size).step_s
            assert fast <= slow * (1 + 1e-9)


@pytest.mark.parametrize("name", SIMULATED)
def test_exposed_exchange_bandwidth_and_payload(
    name: str, profile: Profile, strategies: dict[str, Strategy]
) -> None:
    own, times = strategies[name], []
    for beta in (1e6, 1e7, 1e8, 1e10):
        hardware = replace(FLAT, inter=Link(1e-4, beta), codec_bytes_per_s=1e10)
        found = predict(profile, hardware, own, 4, 128)
        ceiling = predict(profile, hardware, CEILING, 4, 128)
        assert found.exposed_s == found.step.step_s - ceiling.step.step_s >= 0
        assert ceiling.exposed_s == 0 and ceiling.speedup == pytest.approx(4)
        times.append(found.step.step_s)
    assert times == sorted(times, reverse=True) and times[0] > times[-1]


def test_weak_scaling_keeps_the_batch_of_a_rank(
    profile: Profile, strategies: dict[str, Strategy]
) -> None:
    found = predict(profile, FLAT, strategies["allreduce"], 4, 4 * 64, weak=True)
    alone = simulate(profile, FLAT, CEILING, 1, 64).step_s
    assert found.step.step_s == pytest.approx(alone + found.exposed_s)
    assert found.speedup == pytest.approx(4 * alone / found.step.step_s)


def test_512_ranks_cost_as_few_events_as_buckets_have_stages(
    profile: Profile, strategies: dict[str, Strategy]
) -> None:
    num_layers, most_stages = len(profile.layers), 5
    for name in SIMULATED:
        step = simulate(profile, FLAT, replace(strategies[name], bucket_mb=1), 512, 8)
        assert len(step.spans) <= 2 * num_layers + most_stages * 2 * num_layers


@pytest.mark.parametrize("bucket_mb", [None, 0, 1])
def test_buckets_are_those_that_training_plans(bucket_mb: float | None) -> None:
    model = alexnet_small(input_shape=(3, 32, 32), output_size=10)
    named = [(name, parameter.nbytes) for name, parameter in model.named_parameters()]
    real = [list(each.parameters) for each in bucket.plan(model, bucket_mb)]
    assert grouping.group(named[::-1], bucket_mb) == real
    order = [name for name, _ in sorted(named, key=lambda pair: pair[1])]
    arriving = sorted(named, key=lambda pair: order.index(pair[0]))
    real = [list(each.parameters) for each in bucket.plan(model, bucket_mb, order)]
    assert grouping.group(arriving, bucket_mb) == real


@pytest.mark.parametrize("exchange", some_of(EXCHANGES, every=3))
def test_costs_take_time_where_bytes_move(exchange: str) -> None:
    settings = exchange_settings(exchange)
    stages = stages_of([(2048, 1024), (7,)], settings, Network(FLAT, 4))
    sends = sum(stage.payload_bytes for stage in stages)
    assert sends / 1e8 <= 1.000001 * sum(
        stage.seconds for stage in stages
    )  # over links of 1e8 bytes/s
    assert (sends > 0) == (exchange != "none")


LAYERS = [LayerCompute("a", 1.0, 2.0), LayerCompute("b", 1.0, 2.0)]
ENCODE, SEND, DECODE = Stage("codec", 0.5), Stage("exchange", 1.0), Stage("codec", 0.25)


def spans(*given: tuple[str, str, float, float]) -> list[Span]:
    return [Span(0, *one) for one in given]


def test_in_turns_codecs_hold_backward_up_and_go_on_at_hooks() -> None:
    first, second = BucketExchange("x", 1, (ENCODE, SEND, DECODE)), BucketExchange("y", 0, (SEND,))
    done = run(LAYERS, [first, second], OneThread(), contention=0.0)
    assert done.now_s == 7.75
    assert done.spans[2:] == spans(
        ("backward", "b", 2.0, 4.0),
        ("codec", "x", 4.0, 4.5),
        ("exchange", "x", 4.5, 5.5),
        ("backward", "a", 4.5, 6.5),
        ("codec", "x", 6.5, 6.75),
        ("exchange", "y", 6.75, 7.75),
    )


def test_beside_backward_codecs_cost_it_nothing_but_contention() -> None:
    exchange = BucketExchange("x", 1, (ENCODE, SEND, DECODE))
    assert run(LAYERS, [exchange], Beside(), contention=0.0).now_s == 6.0
    slowed = run(LAYERS, [exchange], Beside(), contention=0.5)
    assert slowed.now_s == pytest.approx(6.0 + 1.75 * (1 - 1 / 1.5))


def test_kernels_slow_compute_as_fast_as_they_send_and_codecs_do_not() -> None:
    rank = Rank(0.0, passing_s=0.25)
    for stage in (ENCODE, replace(SEND, seconds=2.0, payload_bytes=4.0)):
        rank.beside(stage, "x", 0.0)
    rank.compute("backward", "a", 0.25)
    assert rank.now_s == 0.25
    rank.compute("backward", "a", 3.0)  # 0.25 s beside the codec, and 2 s at two thirds
    assert rank.now_s == pytest.approx(2.5 + 3.0 - 0.25 - 2.0 / 1.5)


def test_blocking_exchanges_follow_backward() -> None:
    each = [BucketExchange("x", 0, (ENCODE, SEND)), BucketExchange("y", 0, (SEND,))]
    done = run(LAYERS, each, Beside(), contention=0.5)
    assert done.now_s == 8.5
    assert [span.start_s for span in done.spans[4:]] == [6.0, 6.5, 7.5]


def test_shared_cores_slow_codecs(profile: Profile) -> None:
    onebit = strategy("onebit", "overlap=false")
    roomy = replace(FLAT, codec_bytes_per_s=1e9, codec_s=1e-4)
    crowded = replace(roomy, num_cores=2)
    for size, factor in ((2, 1), (4, 2)):
        a, b = (simulate(profile, each, onebit, size, 64) for each in (roomy, crowded))
        codec_s = sum(span.end_s - span.start_s for span in a.spans if span.row == "codec")
        assert b.step_s - a.step_s == pytest.approx((factor - 1) * codec_s)


def test_the_part_of_a_latency_that_needs_a_core_waits_for_one() -> None:
    machine = replace(FLAT, inter=Link(1e-3, 1e12), num_cores=2, message_cpu=0.25)
    for size, factor in ((2, 1.0), (3, 1.125), (4, 1.25)):
        assert Network(machine, size).ring(0).seconds == pytest.approx(2e-3 * (size - 1) * factor)


def test_ranks_that_wait_for_each_other_queue_for_cores(profile: Profile) -> None:
    machine = replace(FLAT, num_cores=2, step_cpu_s=0.01)
    for name, sizes in (("allreduce", {2: 0.0, 4: 0.01, 8: 0.03}), ("none", {8: 0.0})):
        for size, queue_s in sizes.items():
            idle, busy = (
                simulate(profile, each, strategy(name), size, 64).step_s
                for each in (replace(machine, step_cpu_s=0.0), machine)
            )
            assert busy - idle == pytest.approx(queue_s)


GUESS = replace(FLAT, inter=Link(1e-4, 2e8), codec_bytes_per_s=2e10)


def test_a_fit_needs_two_ranks(profile: Profile) -> None:
    with pytest.raises(ValueError, match="run on 2 ranks"):
        fit(GUESS, [Observation("none", profile, CEILING, 1, 64, (0.1,))])


def test_links_and_codecs_are_fitted_to_benchmarks(
    tmp_path: Path, strategies: dict[str, Strategy]
) -> None:
    network = Network(LINKED, 2)
    rows = []
    for name in ("allreduce", "tree", "tree_pipelined"):
        for size in (4096, 2**20, 2**26):
            stages = stages_of([(size // 4,)], strategies[name].exchange, network)
            time_s = {"median": sum(stage.seconds for stage in stages)}
            rows.append({"algorithm": name, "size_bytes": size, "time_s": time_s})
    rows.append({"algorithm": "send/recv", "size_bytes": 4096, "time_s": {"median": 1.0}})
    result = tmp_path / "collective.json"
    result.write_text(json.dumps({"bench": "collective", "world_size": 2, "rows": rows}))
    found = fit_result(result, GUESS)
    assert found.inter and LINKED.inter
    assert found.inter.latency_s == pytest.approx(LINKED.inter.latency_s, rel=1e-3)
    assert found.inter.bandwidth_bytes_per_s == pytest.approx(
        LINKED.inter.bandwidth_bytes_per_s, rel=1e-3
    )

    rows = [{"codec": "onebit", "bytes": 4e9, "time_s": {"median": s}} for s in (0.5, 0.3)]
    result.write_text(json.dumps({"bench": "codec", "rows": rows}))
    assert fit_result(result, GUESS).codec_bytes_per_s == pytest.approx(1e10)
    arguments = ["world_size=4", "hardware=emulated_1gbit", f"fit={result}"]
    assert "codec_bytes_per_s=1e+10" in said(command.main, *arguments)
    result.write_text(json.dumps({"bench": "memory", "rows": []}))
    assert "must be a study, or a result of lab.bench" in refusal(command.main, *arguments)
    assert "was fitted with the cost model of an earlier version" in refusal(
        command.main, *arguments, f"fit={ROOT}/docs/results/links.json"
    )


def test_each_level_has_a_codec_of_its_own(profile: Profile) -> None:
    levels = replace(GUESS, ranks_per_node=2, intra=Link(0.0, 1e9))
    found = stages_of_step(profile, strategy("hierarchical_onebit"), Network(levels, 4))
    assert {stage.codec for stage in found} - {""} == {"Hierarchical", "OneBit"}


def test_owners_products_cost_as_much_as_the_busiest_ones(profile: Profile) -> None:
    """One matrix is dearest: more ranks do not help, and shared cores compute all of them."""

    def products_s(size: int, cores: int | None) -> float:
        machine = replace(LINKED, codec_bytes_per_s=1e9, num_cores=cores, crowding=0.0)
        found = stages_of([(8, 8), (64, 64)], strategy("muon").exchange, Network(machine, size))
        return found[3].seconds

    small, large = (5 * 6 * width**3 / 1e10 for width in (8, 64))
    assert products_s(1, None) == pytest.approx(small + large)
    assert products_s(2, None) == products_s(4, None) == pytest.approx(large)
    assert products_s(2, 1) == pytest.approx(small + large)


def test_a_record_shows_a_schedules_longest_phase() -> None:
    exchange = strategy("schedule", "exchange.until=[0.1,0.3]").exchange
    assert longest_phase(exchange) == exchange["third"]
    assert longest_phase(strategy("onebit").exchange) == strategy("onebit").exchange


def test_predictions_beside_a_study(tmp_path: Path, profile: Profile) -> None:
    """A study over two kinds of links: each is fitted and scored for itself."""
    for rate, slower in (("1gbit", 1), ("100mbit", 10)):
        links = with_rate(TRUE, slowest(TRUE).bandwidth_bytes_per_s / slower)
        of_links = ("cluster=emulated", f"cluster.rate={rate}")
        leave_study(tmp_path / "study", profile, ("none", "tree", "onebit"), links, *of_links)
    grid = ["strategy=none,tree", "world_size=1,2,4,8", "batch_size=128"]
    machine = ["hardware=emulated_1gbit", "profile=alexnet_titanx", "profile.bytes_scale=0.02"]
    out = tmp_path / "all.json"
    text = said(command.main, *grid, *machine, f"fit={tmp_path}/study", f"out={out}")
    result = json.loads(out.read_text())
    rows = {(r["series"], r["world_size"]): r for r in result["rows"]}
    for conditions in ("cluster.rate=100mbit", "cluster.rate=1gbit"):
        of_tree = [rows[f"tree {conditions}", n] for n in (1, 2, 4, 8)]
        evidence = [row["evidence"] for row in of_tree]
        assert evidence == ["fitted", "fitted", "held out", "extrapolated"]
        assert abs(of_tree[2]["error"]) < 0.02
        assert "measured_s" not in of_tree[3]
        assert f"held out at {conditions}: 1 cell with an exchange, step time median" in text
    assert [each["conditions"] for each in result["hardware"]] == [
        "cluster.rate=100mbit",
        "cluster.rate=1gbit",
    ]
    slow, fast = (each["inter"]["bandwidth_bytes_per_s"] for each in result["hardware"])
    assert fast / slow == pytest.approx(10, rel=0.05)
    assert "overhead_s=" in text
    assert (tmp_path / "all.png").is_file()
    drawing = chart(result)
    assert (
        drawing.message.startswith("Predicted: at most ") and "1gbit at global" in drawing.message
    )
    assert overlapping(drawn(drawing.spec(), "svg").decode()) == []
    assert "profile.bytes_scale=0.02" in refusal(
        command.main, *grid, "hardware=emulated_1gbit", f"fit={tmp_path}/study"
    )


def test_micro_batches_are_exchanged_once(profile: Profile) -> None:
    def step(model: Profile, name: str, accumulate: int) -> Step:
        return simulate(model, LINKED, strategy(name, f"accumulate={accumulate}"), 4, 32)

    once, four = step(profile, "tree", 1), step(profile, "tree", 4)
    assert four.step_s == pytest.approx(once.step_s)
    assert four.payload_bytes == once.payload_bytes
    fixed = profile.drawn(1.0)  # a part of each layer's time does not depend on the batch
    again_s = step(fixed, "tree", 4).step_s - step(fixed, "tree", 1).step_s
    assert again_s == pytest.approx(3 * fixed.compute_s(0)) and again_s > 0
    # A quarter of backward hides less.
    assert step(profile, "overlap", 4).step_s > step(profile, "overlap", 1).step_s


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["hardware=eth1g"], "hardware=eth1g: did you mean eth10g? allowed: a100_x8,"),
        (["hardware=eth10g,eth25g"], "hardware=eth10g,eth25g: allowed: a100_x8,"),
        (["profile=vgg"], "profile=vgg: allowed: alexnet_h100, alexnet_p100"),
        (["world_size=8"], "world_size=8: hardware=titanx_x4 has a single node"),
        (["hardware.contention=-1"], "contention=-1: must be a number from 0 to 1000"),
        (["hardware.ranks_per_node=1.5"], "ranks_per_node=1.5: must be an integer"),
        (["hardware.intra.alpha_s=1"], "intra.alpha_s=1 has been renamed to latency_s"),
        (["hardware.speed=1"], "hardware=titanx_x4: "),
        (["strategy=ddp"], "strategy=ddp: DDPSync has its own schedule"),
        (["strategy=fc1x1"], "strategy=fc1x1: changes the model"),
        (["batch_size=130", "world_size=4"], "batch_size=130: must be a multiple of 4 for 4 ranks"),
        (["accumulate=3"], "batch_size=128: must be a multiple of 3 for 1 rank with"),
        (["fit=nowhere"], "fit=nowhere: no such folder"),
        (["fit=nowhere.json"], "fit=nowhere.json: "),
        (
            ["hardware.intra.latency_s=1e308"],
            "latency_s=1e+308: must be a number from 0 to 1000000",
        ),
        (
            ["profile=alexnet_titanx", "profile.bytes_scale=1e300"],
            "bytes_scale=1e+300: must be a number above 0 and at most 1000000",
        ),
        (
            ["model=replay", "profile=alexnet_titanx", "model.bytes_scale=-1"],
            "model.bytes_scale=-1: must be a number above 0",
        ),
        (
            ["model=replay", "profile=alexnet_titanx", "model.time_scale=0"],
            "model.time_scale=0: must be a number above 0",
        ),
        (
            ["strategy=hsdp", "world_size=5", "batch_size=5", "hardware=eth10g"],
            "sync.shard_size=node: 5 ranks cannot be divided into nodes of 4; must be null or a",
        ),
        (["out=table.csv"], "out=table.csv: must name FILE.json or FILE.png"),
        (["trace=step.png"], "trace=step.png: must name FILE.json"),
        (["trace=step.json", "world_size=1,2"], "trace=step.json: needs one cell, but there are 2"),
        (["world_size="], "world_size=: must be an integer from 1 to"),
        (["hardware.from="], "hardware.from=: must be the path of a log"),
        (["hardware.codec_rates.onebit=1e8"], "codec_rates.onebit: no such exchange; allowed:"),
        (["hardware.num_slow=1"], "num_slow=1 slow_factor=1: slows no rank; set both"),
        # What lab.train would refuse is no prediction either.
        (["strategy=local_sgd", "sync.every=0"], "sync.every=0: must be an integer of at least 1"),
        (["strategy=caffe", "optim=adamw"], "strategy=caffe optim=torch.optim.AdamW: emulates"),
        (["strategy=fsdp", "overlap=false"], "overlap=false: must be true; strategy=fsdp always"),
        (["strategy=fsdp", "exchange=topk"], "exchange=TopK: strategy=fsdp has its own exchange"),
        (["strategy=ring", "sync=root_update"], "exchange=Ring: only the root updates, so"),
        (["strategy=muon", "optim=sgd"], "SGD optim.momentum=0.9: the exchange stores the moments"),
        (["strategy=des_loc", "exchange=onebit"], "exchange=OneBit is not exact, but second mom"),
        (["strategy=local_sgd", "exchange=muon"], "exchange=Muon produces a direction; choose"),
        (["strategy=priority", "exchange=auto"], "exchange=Auto: sync=priority also chooses by"),
        (
            ["strategy=zero1", "optim=torch.optim.Adafactor"],
            "optim=torch.optim.Adafactor: each rank updates slices of parameters, but this opt",
        ),
        (
            ["strategy=priority", "optim=tests.support.optimizers.TrustAll"],
            "TrustAll: gives different weights when it updates parameters one by one, as strategy=",
        ),
        (
            ["strategy=local_sgd", "precision=fp16", "model=mlp", "hardware=h100_x8"],
            "precision=fp16: skips steps that overflow, but each rank would skip different steps",
        ),
    ],
)
def test_a_wrong_setting_is_one_line(arguments: list[str], message: str) -> None:
    assert message in refusal(command.main, *arguments)


# Settings of a run that predictions and estimates follow, and those that only place or name cells.
MOVING = {"overlap", "bucket_mb", "batch_size", "scaling", "accumulate"}
PLACING = {"resume", "config_dir", "study", "cell", "repeat", "code"}
GROUPS_THAT_MOVE = {"strategy", "exchange", "sync", "transform", "task", "model", "profile", "data"}
GROUPS_THAT_MOVE |= {"optim"}


def test_each_setting_moves_predictions_or_is_refused() -> None:
    groups = {key for key in INSTEAD if "." not in key}  # keys of `optim` are refused one by one
    assert groups == {*FIELDS, *OF_SWEEP} - MOVING - PLACING - GROUPS_THAT_MOVE - {"world_size"}


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        (("precision=bf16",), "give a profile that lab.profile_layers measured with it"),
        (("profile=resnet50_p100", "tf32=true"), "give a profile that"),
        (("compile=true", "model=mlp"), "give a trace of a step with it, profile.from="),
        (("threads=2",), "set hardware.device.num_threads= for an estimate"),
        (("cluster=emulated", "cluster.rate=1gbit"), "set hardware= or hardware.inter.KEY="),
        (("seed=1,2",), "leave it to lab.train or lab.sweep"),
        (("optim.lr=0.1",), "leave it to lab.train or lab.sweep"),
        (("optim=adamw", "optim.betas=[0.8,0.9]"), "leave it to lab.train or lab.sweep"),
        (("steps=10",), "leave it to lab.train or lab.sweep"),
        (("repeats=3",), "leave it to lab.sweep"),
    ],
)
def test_what_moves_no_prediction_is_refused(words: tuple[str, ...], instead: str) -> None:
    line = refusal(command.main, *words)
    assert " has no effect on a prediction; " in line and instead in line


@pytest.mark.parametrize(
    "words",
    [
        ["precision=fp32", "comm=torch", "cluster=none"],  # as by default
        ["optim.momentum=0", "optim=sgd"],  # which passes over no momentum
        ["precision=fp16", "model=mlp", "hardware=v100_10g"],  # an estimate has a peak for it
        ["study=kim2017", "hardware=emulated_1gbit", "cluster.rate=1gbit"],  # narrows the study
        ["strategy=schedule", "exchange.until=[3,5]", "steps=10"],  # ends phases
        ["steps=5", "device=cpu", "measured=runs"],  # measured cells had them
    ],
)
def test_what_has_an_effect_or_comes_with_cells_is_accepted(words: list[str]) -> None:
    assert read(words).cells


def test_values_of_hardware_that_move_no_step_are_named() -> None:
    words = ["hardware=h100_x8", "world_size=8", "strategy=allreduce"]
    words += ["hardware.intra.latency_s=0.1", "hardware.intra.bandwidth_bytes_per_s=1e9"]
    text = said(command.main, *words, "hardware.memory_bytes=1e9")
    line = "no effect on these steps: hardware.intra.latency_s, hardware.memory_bytes\n"
    assert line in text  # NCCL's own tuning has the latency, and memory is lab.advise's
    assert "no effect" not in said(command.main, *words[:3], "hardware.engage=0.1")


def test_a_model_beside_a_profile_is_said_to_move_no_step() -> None:
    words = "strategy=none", "world_size=1", "batch_size=64", "profile=resnet50_p100"
    typed = "model=lenet", "task=classification"
    assert f"no effect on these steps: {', '.join(typed)}\n" in said(command.main, *words, *typed)
    assert "no effect" not in said(command.main, *words, "model=replay", "model.bytes_scale=0.5")
    assert "no effect" not in said(command.main, *words[:3], "model=lenet", "precision=fp32")


def test_an_unknown_study_is_no_default_grid() -> None:
    line = refusal(command.main, "study=kim2071", "world_size=2")
    assert line.startswith("study=kim2071: no such study; did you mean kim2017? allowed: ")


def test_an_empty_profile_is_no_estimate(tmp_path: Path) -> None:
    (tmp_path / "profile").mkdir()
    (tmp_path / "profile/mine.yaml").write_text("")
    found = refusal(command.main, f"config_dir={tmp_path}", "profile=mine")
    assert found.startswith("profile=mine: the file is empty")


def test_a_profile_without_times_is_refused(tmp_path: Path) -> None:
    layer = {"name": "a", "parameters": 1000, "forward_ms": 0, "backward_ms": 0}
    node = {"source": "x", "reference_batch": 8, "layers": [layer]}
    (tmp_path / "still.yaml").write_text(json.dumps(node))
    for size in (1, 2):
        line = refusal(command.main, f"profile={tmp_path}/still.yaml", f"world_size={size}")
        assert line.startswith("profile=still: all times are 0")


def test_a_file_without_a_name_has_that_of_the_file(tmp_path: Path) -> None:
    for group, name in (("hardware", "eth10g"), ("profile", "resnet50_p100")):
        node = {key: value for key, value in read_file(group, name).items() if key != "name"}
        (tmp_path / f"my_{group}.yaml").write_text(json.dumps(node))
    found = read([f"{group}={tmp_path}/my_{group}.yaml" for group in ("hardware", "profile")])
    assert found.hardware.name == "my_hardware"
    assert found.profiles[0] and found.profiles[0].name == "my_profile"


def test_a_table_has_no_empty_columns_and_fits_a_terminal() -> None:
    grid = ["scaling=weak", "world_size=8,4096", "strategy=hierarchical_onebit"]
    text = said(command.main, "hardware=h200_nvlink_400g", *grid)
    header, *rows = text.partition("\n\n")[0].splitlines()
    names = ["strategy", "N", "batch", "step ms", "exposed ms", "speedup", "80 %", "efficiency"]
    assert [name for name in HEADER if name in header] == names
    assert max(map(len, (header, *rows))) <= 110
    assert "held out" not in text and "predictions were not compared" in text  # nothing was fitted


def test_what_is_given_replaces_the_files_value_as_a_whole() -> None:
    links = read(["hardware=dgx1_p100", "hardware.intra.num_links={2: 1}"]).hardware.intra
    assert links and links.num_links == ((2, 1),)
    alone = read(["hardware=eth10g", "hardware.inter=null"]).hardware  # and its assumed values
    assert alone.inter is None and not any(r.key.startswith("inter.") for r in alone.assumed)


def test_a_step_leaves_a_timeline(tmp_path: Path) -> None:
    trace = tmp_path / "step.json"
    cell = ["strategy=overlap", "world_size=4", "batch_size=512"]
    text = said(command.main, *cell, f"trace={trace}")
    timeline = read_trace(trace)
    rows = {
        row: [s.name for s in timeline.spans if s.row == row] for row in ("forward", "backward")
    }
    layers = ["conv1", "conv2", "conv3", "conv4", "conv5", "fc6", "fc7", "fc8"]
    assert rows == {"forward": layers, "backward": layers[::-1]}
    step_s = max(span.end_s for span in timeline.spans)
    assert f"{1e3 * step_s:.2f}" in text
    assert trace.with_suffix(".png").is_file()


def test_replayed_cells_are_predicted_from_what_they_replay(tmp_path: Path) -> None:
    out = tmp_path / "all.json"
    grid = ["study=kim2017", "strategy=tree", "world_size=4", "hardware=emulated_1gbit"]
    said(command.main, *grid, f"out={out}")
    result = json.loads(out.read_text())
    assert result["profiles"] == {"alexnet_titanx": pytest.approx(0.02124 * 4 * 62378344, rel=1e-4)}
    adding_s = 2 * 5.3e6 / 1e9  # on two levels, at the preset's reduce_bytes_per_s
    closed_form = {
        batch_size: 0.2 * batch_size / 256 / 4 + 4 * 0.045 + adding_s
        for batch_size in (128, 256, 512)
    }
    found = {row["batch_size"]: row["step_s"] for row in result["rows"]}
    assert found == pytest.approx(closed_form, rel=0.03)


def test_the_root_updates_after_the_way_up_and_before_the_way_down(profile: Profile) -> None:
    tree, caffe = (simulate(profile, FLAT, strategy(name), 4, 64) for name in ("tree", "caffe"))
    assert caffe.step_s == pytest.approx(tree.step_s)
    assert caffe.payload_bytes == pytest.approx(tree.payload_bytes)
    # Overlap hides at most the way up; weights go down after the update.
    star, tensorflow = (
        simulate(profile, FLAT, strategy(n), 4, 64) for n in ("torch7", "tensorflow")
    )
    compute_s = profile.compute_s(64)
    assert tensorflow.step_s >= compute_s + (star.step_s - compute_s) / 2


def test_double_buffering_hides_an_exchange_behind_the_whole_next_step(profile: Profile) -> None:
    blocking = simulate(profile, FLAT, strategy("cntk"), 4, 64)
    buffered = simulate(profile, FLAT, strategy("cntk", "sync.double_buffer=true"), 4, 64)
    compute_s = profile.compute_s(64)
    codec_s = sum(s.end_s - s.start_s for s in buffered.spans if s.row == "codec")
    exchange_s = sum(s.end_s - s.start_s for s in buffered.spans if s.row == "exchange")
    assert blocking.step_s == pytest.approx(compute_s + codec_s + exchange_s)
    assert buffered.step_s == pytest.approx(compute_s)


def test_fragments_are_hidden_behind_the_steps_of_their_delay(profile: Profile) -> None:
    whole = simulate(profile, FLAT, strategy("diloco"), 4, 64)
    compute_s = profile.compute_s(64)

    def in_fragments(*settings: str, overlap: bool = True) -> Step:
        settings = *settings, f"overlap={str(overlap).lower()}"
        return simulate(profile, FLAT, strategy("streaming_diloco", *settings), 4, 64)

    waiting = in_fragments("sync.fragments=1", "sync.delay=0", overlap=False)
    assert waiting.step_s == pytest.approx(whole.step_s)
    for number in (1, 2, 5):
        assert in_fragments(f"sync.fragments={number}").payload_bytes == pytest.approx(
            whole.payload_bytes
        )
    # An exchange of E seconds beside one step of T delays each round by E - T, and beside ten by 0.
    exchange_s = 10 * (whole.step_s - compute_s)
    assert exchange_s > compute_s
    beside_one = in_fragments("sync.fragments=1", "sync.delay=1")
    assert 10 * beside_one.step_s == pytest.approx(9 * compute_s + exchange_s)
    assert in_fragments("sync.fragments=1", "sync.delay=10").step_s < beside_one.step_s
    quiet = replace(FLAT, inter=replace(FLAT.inter, bandwidth_bytes_per_s=1e12))  # type: ignore[type-var]
    hidden = simulate(profile, quiet, strategy("streaming_diloco"), 4, 64)
    assert hidden.step_s == pytest.approx(compute_s, rel=1e-3)


def test_a_schedule_takes_the_mean_of_its_phases_over_the_run(profile: Profile) -> None:
    # Without overlap, where the thread or turns that PowerSGD decides for all make no difference.
    settings = ("overlap=false", "exchange.until=[0.2,0.5]")
    run = simulate(profile, FLAT, strategy("schedule", *settings), 4, 64)
    phases = [
        simulate(profile, FLAT, strategy(name, "overlap=false"), 4, 64)
        for name in ("overlap", "powersgd", "onebit")
    ]
    shares = (0.2, 0.3, 0.5)
    for field in ("step_s", "payload_bytes"):
        expected = sum(
            share * getattr(step, field) for share, step in zip(shares, phases, strict=True)
        )
        assert getattr(run, field) == pytest.approx(expected)


def test_priority_hides_behind_forward_what_overlap_exposes() -> None:
    # A late layer with nearly all the bytes: its gradient is there first, and needed last.
    parameters = [1000, 1000, 2_000_000]
    layers = [
        {"name": name, "parameters": n, "forward_ms": 50, "backward_ms": 50}
        for name, n in zip("abc", parameters, strict=True)
    ]
    profile = Profile.parse(
        {"name": "x", "source": "made up", "reference_batch": 1, "layers": layers}
    )
    link = replace(FLAT, inter=Link(0.0, 40e6), burst_s=0.0)  # 0.2 s for all
    prioritised = strategy("priority", "sync.trials=0", "sync.chunk_mb=0.4")
    ours, theirs, alone = (
        simulate(profile, link, each, 2, 1) for each in (prioritised, strategy("overlap"), CEILING)
    )
    assert alone.step_s == pytest.approx(0.3)
    assert theirs.step_s == pytest.approx(0.4, rel=0.01)  # after c's backward 0.1 s remain to hide
    assert ours.step_s == pytest.approx(0.3, rel=0.01)
    assert ours.payload_bytes == pytest.approx(theirs.payload_bytes)
    spans = [span for span in ours.spans if span.row == "exchange"]
    assert any(span.name.startswith("c.weight[") for span in spans)
    # In the step's end the small bucket overtakes: parts of `c` follow it, in the next forward.
    small = [span for span in spans if not span.name.startswith("c.weight[")]
    assert small and max(s.start_s for s in small) < max(s.start_s for s in spans)


def test_priority_falls_back_to_overlap_where_messages_are_dear(profile: Profile) -> None:
    slow = replace(FLAT, inter=Link(0.05, 1e9))  # messages are dear
    overlap = simulate(profile, slow, strategy("overlap"), 4, 64)
    tried, always = (
        simulate(profile, slow, strategy("priority", "sync.chunk_mb=1", f"sync.trials={n}"), 4, 64)
        for n in (3, 0)
    )
    assert always.step_s > overlap.step_s == tried.step_s


def test_auto_is_no_slower_than_the_fastest_of_its_candidates(profile: Profile) -> None:
    for link in (Link(0.0, 1e7), Link(1e-3, 1e9)):
        hardware, fixed = replace(FLAT, inter=link), ("overlap", "bf16", "onebit", "topk")
        ours = simulate(profile, hardware, strategy("auto"), 4, 64).step_s
        assert ours <= min(simulate(profile, hardware, strategy(f), 4, 64).step_s for f in fixed)
