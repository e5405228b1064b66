"""Files of conf/hardware: what they assume, and within which range."""

from __future__ import annotations

import math
from typing import Any

import pytest

from lab.settings.files import choices_of, read_file
from lab.simulate.hardware import draws, parse

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


def test_draws_cover_the_ranges_and_are_the_same_each_time() -> None:
    hardware = parse(NODE)
    drawn = list(draws(hardware, 400))
    rates = sorted(each.intra.bandwidth_bytes_per_s for each in drawn if each.intra)
    assert 1e8 <= rates[0] < 1.2e8 and 0.8e10 < rates[-1] <= 1e10
    assert rates[200] == pytest.approx(1e9, rel=0.3)  # even in the logarithm
    assert {each.codec_bytes_per_s for each in drawn} == {1e9}
    assert all(0 <= each.contention <= 0.2 for each in drawn)
    assert drawn == list(draws(hardware, 400))


@pytest.mark.parametrize("name", choices_of("hardware"))
def test_every_figure_said_to_be_assumed_has_a_range(name: str) -> None:
    hardware = parse(read_file("hardware", name))
    assert hardware.name == name and hardware.source
    text = (read_text(name)).splitlines()
    marked = [line.split(":")[0].strip() for line in text if "# assumed" in line]
    ranges = {each.key.rpartition(".")[2] for each in hardware.assumed}
    assert set(marked) - {"library"} <= ranges
    assert all(math.isfinite(each.high) for each in hardware.assumed) and hardware.assumed


def read_text(name: str) -> str:
    from lab.settings.files import conf_dir

    return (conf_dir() / f"hardware/{name}.yaml").read_text()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"assumed": {"contention": [0.2, 0.3]}},
            r"assumed.contention=.* leaves out its value 0.1",
        ),
        ({"assumed": {"speed": [1, 2]}}, "speed"),
        (
            {"assumed": {"contention": [1]}},
            r"=\[1\]: must be \[lowest, highest\]",
        ),
        ({"assumed": {"inter.latency_s": [0, 1]}}, "latency_s"),
        ({"protocols": ["LL64"]}, "protocols=.*must be some of LL, LL128, Simple"),
        ({"node_rates": [0]}, "node_rates=0: must be a number of at least 1"),
        ({"colour": 3}, "colour=3: no such key; allowed are name, source, library"),
        ({"intra": {**NODE["intra"], "delay": 3}}, "intra: delay=3: no such key; allowed are lat"),
        ({"intra": {"latency_s": 1e-6}}, "intra: bandwidth_bytes_per_s: is missing"),
        ({"jitter": -1}, "jitter=-1: must be a number of at least 0"),
        ({"intra": {**NODE["intra"], "num_links": {4: 3}}}, "num_links=.*must begin with 2 ranks"),
    ],
)
def test_a_wrong_figure_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(NODE | change)
