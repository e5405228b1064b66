"""NCCL's choices and times against what was published of them, and logs of collectives."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from lab.claims.claims import Paper
from lab.settings.errors import ConfigError
from lab.settings.files import read_file
from lab.simulate import nccl
from lab.simulate.collectives import read_log
from lab.simulate.hardware import parse
from lab.simulate.nccl import NvlinkRanks, all_gather, all_reduce
from lab.simulate.network import Network
from lab.simulate.predict import read
from lab.simulate.terms import drawn

MIB = 2**20
HOPPER = NvlinkRanks("hopper", 8, 1, 18 * 20.6e9, math.inf)
AMPERE = NvlinkRanks("ampere", 8, 1, 12 * 20.0e9, math.inf)
PUBLISHED = Paper.parse(read_file("claims", "nccl_tests"))


def test_eight_h100_take_a_ring_of_ll_up_to_1_mib_and_the_switch_from_2_mib_on() -> None:
    """As NVIDIA/nccl-tests, issue 309, says of NCCL 2.26."""
    small = {all_reduce(HOPPER, 2**power) for power in (13, 16, 20)}
    large = {all_reduce(HOPPER, 2**power) for power in (21, 25, 34)}
    assert {(way.algorithm, way.protocol) for way in small} == {("ring", "LL")}
    assert {(way.algorithm, way.protocol) for way in large} == {("NVLS", "Simple")}


def test_without_a_switch_that_adds_the_largest_take_a_simple_ring() -> None:
    ways = {all_reduce(replace(AMPERE, generation=each), 2**30) for each in ("volta", "ampere")}
    assert {(way.algorithm, way.protocol) for way in ways} == {("ring", "Simple")}
    pair = all_reduce(replace(HOPPER, local=2), 2**30)
    assert pair.algorithm == "ring"  # of two, whose sum a switch would send once too often


def test_a_ring_and_a_switch_reach_the_rates_that_nvidia_names() -> None:
    """370 GB/s by rings, 480 by NVLS (NVIDIA/nccl-tests, issue 212)."""
    rings = [way for way in nccl._ways(HOPPER, 2**34) if way.algorithm == "ring"]
    ring = min(rings, key=lambda way: way.seconds)
    assert 14 / 8 * 2**34 / ring.seconds / 1e9 == pytest.approx(370, rel=0.03)
    switch = all_reduce(HOPPER, 2**34)
    assert 14 / 8 * 2**34 / switch.seconds / 1e9 == pytest.approx(480, rel=0.03)


def test_a_ring_of_ll128_is_the_closed_form() -> None:
    way = all_reduce(AMPERE, 8 * MIB)
    assert (way.algorithm, way.protocol) == ("ring", "LL128")
    path_s, wire_s = 14 * 1.9e-6, 14 / 8 * 8 * MIB / (0.92 * 240e9)
    assert way.ranked_s == pytest.approx(14e-6 + path_s + wire_s)
    filled_s = 2 * math.sqrt(nccl.RAMP * path_s * wire_s)
    assert way.seconds == pytest.approx(way.ranked_s + filled_s)


@pytest.mark.parametrize(("nodes", "sent"), [(2, 1), (4, 2)])
def test_a_tree_of_switches_is_bounded_by_either_kind_of_links(nodes: int, sent: int) -> None:
    many = replace(HOPPER, nodes=nodes, inter=8 * 50e9)
    way, num_bytes = all_reduce(many, 2**30), 2**30
    assert way.algorithm == "NVLS tree"
    inside_s, outside_s = 9 / 8 * num_bytes / (0.85 * HOPPER.intra), sent * num_bytes / 400e9
    assert way.wire_s == pytest.approx(max(inside_s, outside_s))
    assert way.path_s == pytest.approx((25 + 2 * math.log2(nodes) * 20.9) * 1e-6)


def test_small_messages_among_nodes_take_a_tree() -> None:
    many = replace(AMPERE, nodes=16, inter=8 * 25e9)
    assert all_reduce(many, 2**13).algorithm == "tree"
    assert all_gather(many, 2**13).algorithm == "ring"  # there is no other


def test_a_larger_message_takes_longer_and_more_ranks_do_too() -> None:
    sizes = [2**power for power in range(8, 35)]
    for generation in nccl.GENERATIONS:
        ranks = [NvlinkRanks(generation, 8, nodes, 2e11, 1e11) for nodes in (1, 2, 3, 4, 64)]
        table = [[all_reduce(each, size).ranked_s for size in sizes] for each in ranks[2:]]
        assert all(row == sorted(row) for row in table)
        assert all(list(column) == sorted(column) for column in zip(*table, strict=True))


def test_the_one_fitted_value_is_the_best_for_the_claims_that_are_inputs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fitted = [claim for claim in PUBLISHED.claims if claim.role == "input"]
    assert len(fitted) == 6

    def squares(ramp: float) -> float:
        monkeypatch.setattr(nccl, "RAMP", ramp)
        errors = []
        for claim in fitted:
            num_bytes = claim.at.num_bytes or 0
            found = 14 / 8 * num_bytes / all_reduce(HOPPER, num_bytes).seconds / 1e9
            errors.append(math.log(found / (claim.published or math.nan)))
        return sum(error**2 for error in errors)

    own = nccl.RAMP
    assert squares(own) <= min(squares(1.05 * own), squares(own / 1.05))


def test_a_network_takes_them_where_the_hardware_names_a_generation() -> None:
    hardware = parse(read_file("hardware", "h100_x8"))
    network = Network(hardware, 8)
    assert network.all_reduce(2**30).seconds == pytest.approx(all_reduce(HOPPER, 2**30).seconds)
    gathered = all_gather(HOPPER, 2**20).seconds
    assert network.all_gather(2**20).seconds == pytest.approx(gathered)
    older = replace(hardware, nccl=None)
    assert Network(older, 8).all_reduce(2**30).seconds > 1.1 * network.all_reduce(2**30).seconds
    assert Network(hardware, 1).all_reduce(2**30).seconds == 0


LOGS = Path(__file__).parents[2] / "data/nccl_tests"
A3MEGA, OCI = LOGS / "a3mega_16_h100.txt", LOGS / "oci_16_h100.txt"
GIB = 2**30


def test_public_logs_are_read() -> None:
    (a3mega,), (oci,) = read_log(A3MEGA), read_log(OCI)
    assert (a3mega.operation, a3mega.ranks, len(a3mega.points)) == ("all_reduce", 16, 7)
    assert (oci.operation, oci.ranks) == ("all_reduce", 16)  # by its bandwidths: it lists no rank
    assert a3mega.seconds(MIB) == pytest.approx(203.2e-6)
    assert a3mega.seconds(4 * MIB) == pytest.approx(math.sqrt(203.2 * 977.6) * 1e-6)
    assert oci.seconds(GIB) == pytest.approx(4511.2e-6)


def test_json_and_param_say_the_same(tmp_path: Path) -> None:
    rows = ((MIB, 203.2, 5.16, 9.68), (16 * MIB, 977.6, 17.16, 32.18))
    results = [
        {"size": size, "out_of_place": {"time": us, "alg_bw": alg, "bus_bw": bus}, "in_place": None}
        for size, us, alg, bus in rows
    ]
    as_json, as_param = tmp_path / "log.json", tmp_path / "param.txt"
    as_json.write_text(json.dumps({"args": ["./all_reduce_perf", "-J"], "results": results}))
    lines = (
        f"\tCOMMS-RES-all_reduce-float32 {size} {size // 4} {us} 1.0 1.0 1.0 1.0 {alg} {bus}\n"
        for size, us, alg, bus in rows
    )
    as_param.write_text("".join(lines))
    (whole,) = read_log(A3MEGA)
    for path in (as_json, as_param):
        (found,) = read_log(path)
        assert (found.operation, found.ranks) == ("all_reduce", 16)
        assert found.points == tuple(point for point in whole.points if MIB <= point[0] <= 16 * MIB)


def test_a_collective_takes_what_the_log_says_at_its_size_and_ranks() -> None:
    plain = parse(read_file("hardware", "h100_x8"))
    hardware = replace(plain, measured=read_log(A3MEGA))
    assert Network(hardware, 16).all_reduce(MIB).seconds == pytest.approx(203.2e-6)
    # Elsewhere the model's growth with ranks and bytes remains, and one node is not in the log.
    longer = 203.2e-6 / Network(plain, 16).all_reduce(MIB).seconds
    more = Network(plain, 32).all_reduce(MIB).seconds
    assert Network(hardware, 32).all_reduce(MIB).seconds == pytest.approx(longer * more)
    assert Network(hardware, 8).all_reduce(MIB) == Network(plain, 8).all_reduce(MIB)


def test_a_log_replaces_learned_terms_only_of_the_links_that_it_has(tmp_path: Path) -> None:
    plain = ["profile=resnet50_p100", "hardware=h100x8_ndr"]
    inside = tmp_path / "inside.json"
    sizes = {MIB: 40, GIB: 4400}
    rows = [
        {
            "size": size,
            "out_of_place": {"time": us, "alg_bw": size / us, "bus_bw": 1.75 * size / us},
        }
        for size, us in sizes.items()
    ]
    inside.write_text(json.dumps({"args": ["./all_reduce_perf", "-J"], "results": rows}))
    unlogged = read(plain).hardware
    within, between = (read([*plain, f"hardware.from={log}"]).hardware for log in (inside, A3MEGA))
    of_file = parse(read_file("hardware", "h100x8_ndr"))
    assert within.inter == unlogged.inter == of_file.inter == between.inter
    assert between.intra == unlogged.intra != of_file.intra == within.intra
    assert within.incast == unlogged.incast > between.incast == 0
    # Nodes exchange as without a log, and a node as in it; so do all draws of the terms.
    draws = [replace(each, measured=()) for each in drawn([within, unlogged])]
    assert draws[0].incast != unlogged.incast and draws[0].intra == of_file.intra
    assert Network(within, 32).all_reduce(GIB) == Network(unlogged, 32).all_reduce(GIB)
    assert Network(within, 8).all_reduce(GIB).seconds == pytest.approx(4400e-6)


def test_a_log_of_more_ranks_than_the_hardware_has_is_refused() -> None:
    with pytest.raises(ConfigError, match="has 16 ranks; hardware=titanx_x4 has a single node"):
        read(["hardware=titanx_x4", f"hardware.from={A3MEGA}"])


def test_a_log_of_something_else_is_refused(tmp_path: Path) -> None:
    for text, why in (
        ("hello", "contains no line"),
        ('{"results": [{}]}', "not JSON from nccl-tests"),
    ):
        path = tmp_path / "log"
        path.write_text(text)
        with pytest.raises(ValueError, match=why):
            read_log(path)
