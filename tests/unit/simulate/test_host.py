"""Terms of a GPU's step beside its device's work: the host that launches it, and codecs on it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from lab.model.profile import Layer, Profile
from lab.settings.files import read_file
from lab.simulate.hardware import Hardware, Host, Link, draws, parse
from lab.simulate.network import Network
from lab.simulate.step import simulate, stages_of_step
from lab.simulate.strategy import CEILING
from tests.support.simulated import strategy

LAYER = Layer("fc", 2_000_000, forward_ms=10, backward_ms=20)
PROFILE = Profile("one layer", "made up", 8, (LAYER,), num_kernels=100)
NODE = Hardware("node", "made up", "nccl", 8, Link(3.4e-6, 4.5e11), None, math.inf)


def step_s(hardware: Hardware, name: str, size: int, **changes: int) -> float:
    way = replace(CEILING if name == "none" else strategy(name, "transform=none"), **changes)
    return simulate(PROFILE, hardware, way, size, 8).step_s


@pytest.mark.parametrize("size", [1, 8])
def test_a_step_is_never_shorter_than_its_host(size: int) -> None:
    """Each kernel, hook, bucket and call of a codec costs the host; a fast host costs nothing."""
    host = Host(kernel_s=1e-3, parameter_s=1e-2, bucket_s=2e-2, codec_s=3e-2)
    slow = replace(NODE, host=host)
    assert step_s(slow, "none", size) == pytest.approx(0.1)
    assert step_s(slow, "overlap", size) == pytest.approx(0.1 + 1e-2 + 2e-2)
    assert step_s(slow, "onebit", size) == pytest.approx(0.1 + 1e-2 + 2e-2 + 3 * 3e-2)
    fast = replace(NODE, host=Host(kernel_s=1e-5))
    for name in ("none", "overlap", "onebit"):
        assert step_s(fast, name, size) == step_s(NODE, name, size)


def test_each_micro_batch_is_launched() -> None:
    slow = replace(NODE, host=Host(kernel_s=1e-3))
    assert step_s(slow, "none", 1, accumulate=4) == pytest.approx(0.4)


def test_a_codec_on_the_device_delays_its_compute() -> None:
    """Beside it, an H100's added 1.2 ms to a step of 26 that could have hidden them."""
    codec = replace(NODE, codec_bytes_per_s=1e10)
    way = strategy("onebit", "transform=none")
    stages = stages_of_step(PROFILE, way, Network(codec, 8))
    codec_s = sum(stage.seconds for stage in stages if stage.row == "codec")
    alone_s = step_s(codec, "onebit", 8)
    filled = replace(codec, codec_contention=1.0)
    assert step_s(filled, "onebit", 8) == pytest.approx(alone_s)  # one bucket hides nothing

    layers = (LAYER, replace(LAYER, name="fc2", backward_ms=200))
    two = replace(PROFILE, layers=(replace(LAYER, name="first"), *layers[1:]))
    hidden, delayed = (simulate(two, each, way, 8, 8).step_s for each in (codec, filled))
    assert hidden < delayed <= hidden + 2 * codec_s


def test_wrong_terms_are_named_and_open_ones_drawn() -> None:
    node = dict(read_file("hardware", "h100_x8"))
    with pytest.raises(ValueError, match="nccl=turing: allowed are volta, ampere, hopper"):
        parse({**node, "nccl": "turing"})
    with pytest.raises(ValueError, match="host: speed=1: no such key; allowed are kernel_s"):
        parse({**node, "host": {"speed": 1}})
    with pytest.raises(ValueError, match=r"host.kernel_s=-1: must be a number of at least 0"):
        parse({**node, "host": {"kernel_s": -1}})
    found = {each.host.codec_s for each in draws(parse(node)) if each.host}
    assert len(found) > 30 and 1e-5 <= min(found) < max(found) <= 1e-4
