"""Logs of nccl-tests and PARAM: what is read, and predictions from it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from lab.settings.files import read_file
from lab.simulate.collectives import read_log
from lab.simulate.hardware import parse
from lab.simulate.network import Network

LOGS = Path(__file__).parents[2] / "data/nccl_tests"
A3MEGA, OCI = LOGS / "a3mega_16_h100.txt", LOGS / "oci_16_h100.txt"
MIB, GIB = 2**20, 2**30


def test_public_logs_are_read() -> None:
    (a3mega,), (oci,) = read_log(A3MEGA), read_log(OCI)
    assert (a3mega.operation, a3mega.ranks, len(a3mega.points)) == ("all_reduce", 16, 7)
    assert (oci.operation, oci.ranks) == ("all_reduce", 16)  # by its bandwidths: it lists no rank
    assert a3mega.seconds(MIB) == pytest.approx(203.2e-6)
    assert a3mega.seconds(4 * MIB) == pytest.approx(math.sqrt(203.2 * 977.6) * 1e-6)
    size, alpha, rate = next(line for line in oci.lines() if line[0] == GIB)
    assert alpha + size / rate == pytest.approx(4511.2e-6)


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


def test_a_log_of_something_else_is_refused(tmp_path: Path) -> None:
    for text, why in (
        ("hello", "holds no line"),
        ('{"results": [{}]}', "is no JSON of nccl-tests"),
    ):
        path = tmp_path / "log"
        path.write_text(text)
        with pytest.raises(ValueError, match=why):
            read_log(path)
