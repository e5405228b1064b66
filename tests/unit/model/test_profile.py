"""Profiles: allowed files, and the scaling of times and sizes."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from lab.model.profile import Profile
from lab.settings.config import choices_of, load
from tests.support import refusing

LAYERS = [
    {"name": "conv", "parameters": 10, "forward_ms": 4.0, "backward_ms": 8.0},
    {
        **{"name": "fc", "parameters": 1000, "forward_ms": 1.0, "backward_ms": 3.0},
        **{"fixed_forward_ms": 0.5, "fixed_backward_ms": 3.0},
    },
]
NODE: dict[str, Any] = {
    **{"name": "small", "source": "made up", "reference_batch": 8, "layers": LAYERS}
}


def test_time_grows_with_the_batch_except_its_fixed_part() -> None:
    profile = Profile.parse(NODE)
    conv, fc = profile.layers
    assert profile.forward_s(conv, 16) == pytest.approx(0.008)
    assert profile.forward_s(fc, 16) == pytest.approx(0.0015)
    assert profile.backward_s(fc, 16) == profile.backward_s(fc, 1) == pytest.approx(0.003)
    assert profile.compute_s(8) == pytest.approx(0.016)


def test_scales_multiply_what_the_profile_has() -> None:
    profile = Profile.parse({**NODE, "bytes_scale": 0.5}).scaled(bytes_scale=0.1, time_scale=2)
    assert [profile.values(layer) for layer in profile.layers] == [0, 50]
    assert profile.gradient_bytes == 200
    assert profile.compute_s(8) == pytest.approx(0.032)
    assert profile.backward_s(profile.layers[1], 1) == pytest.approx(0.006)


@pytest.mark.parametrize("name", [name for name in choices_of("profile") if name != "none"])
def test_every_file_is_a_profile_of_its_name(name: str) -> None:
    profile = Profile.parse(load([f"profile={name}"]).profile)
    assert profile.name == name
    assert profile.source


def test_alexnet_has_the_papers_figures() -> None:
    profile = Profile.parse(load(["profile=alexnet_titanx"]).profile)
    assert profile.compute_s(256) == pytest.approx(0.2, rel=1e-3)
    assert profile.gradient_bytes == 4 * 62_378_344  # those of model=alexnet_paper
    small_head = Profile.parse(load(["profile=alexnet_titanx_fc1x1"]).profile)
    assert small_head.gradient_bytes == 4 * 6_084_968  # those of transform=fc1x1
    assert profile.scaled(bytes_scale=0.02124).gradient_bytes == pytest.approx(5.3e6, rel=0.01)


def test_an_assumed_fixed_share_is_drawn_and_costs_small_batches() -> None:
    given = Profile.parse(load(["profile=alexnet_titanx"]).profile)
    assert given.fixed_share == (0.0, 0.12)
    least, most = given.drawn(0.0), given.drawn(1.0)
    assert least.compute_s(32) == pytest.approx(given.compute_s(32))
    assert most.compute_s(256) == pytest.approx(given.compute_s(256))
    assert most.compute_s(32) == pytest.approx(0.2 * (0.12 + 0.88 / 8), rel=1e-3)
    vgg16 = Profile.parse(load(["profile=vgg16_p100"]).profile)  # two batches are known
    assert vgg16.drawn(0.5) is vgg16 and vgg16.layers[3].fixed_forward_ms > 0


def test_the_rest_of_a_step_scales_like_a_layer() -> None:
    profile = Profile.parse({**NODE, "rest_ms": 2.0, "fixed_rest_ms": 1.0, "step_ms": 18.0})
    assert profile.rest_s(8) == pytest.approx(0.002)
    assert profile.rest_s(16) == pytest.approx(0.003)
    slower = profile.scaled(time_scale=2)
    assert (slower.rest_s(8), slower.step_ms) == (pytest.approx(0.004), 36.0)
    assert Profile.parse(NODE).scaled(time_scale=2).rest_s(8) is None


ENDS = {"median": 1.0, "low": 0.5, "high": 4.0}
FIT = {"layer": "(all layers)", "way": "forward and backward"}
FIT |= {"fixed_ms": ENDS, "per_sample_ms": {"median": 0.1, "low": None, "high": None}}


def test_fits_say_how_much_of_the_time_may_be_fixed() -> None:
    profile = Profile.parse({**NODE, "fits": [FIT]})
    for scaled, factor in ((profile, 1.0), (profile.scaled(time_scale=3), 3.0)):
        least, most = scaled.drawn(0.0), scaled.drawn(1.0)
        assert scaled.compute_s(8) == pytest.approx(factor * 0.016)
        assert least.compute_s(8) == most.compute_s(8) == pytest.approx(factor * 0.016)
        # 4 ms are fixed at most: all of what is left is halved with the batch.
        assert most.compute_s(4) == pytest.approx(factor * (0.004 + 0.012 / 2), rel=0.03)
        assert least.compute_s(4) < scaled.compute_s(4) < most.compute_s(4)
    conv = most.layers[0]
    assert 0 < conv.fixed_forward_ms < conv.forward_ms and most.drawn(0.5) is most


def test_fits_are_written_and_read() -> None:
    profile = Profile.parse({**NODE, "fits": [FIT]})
    assert Profile.parse(yaml.safe_load(profile.to_yaml())) == profile


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rest_ms": -1}, "rest_ms=-1: must be a number of at least 0"),
        ({"step_ms": "a"}, "step_ms=a: must be a number of at least 0"),
        ({"fixed_rest_ms": 1.0}, "fixed_rest_ms=1.0: must be from 0 to rest_ms=0.0"),
        ({"num_threads": 0}, "num_threads=0: must be an integer of at least 1"),
        ({"fixed_share": [0.2, 0.1]}, "fixed_share=[0.2, 0.1]: must be [lowest, highest]"),
        ({"fixed_share": 0.1}, "fixed_share=0.1: must be [lowest, highest]"),
        ({"reference_batch": 0}, "reference_batch=0: must be an integer of at least 1"),
        ({"bytes_scale": "a"}, "bytes_scale=a: must be a number above 0"),
        ({"source": None}, "source: is missing"),
        ({"layers": []}, "layers=[]: must contain at least one layer"),
        ({"layers": "conv"}, "layers=conv: must be a list"),
        ({"layers": [3]}, "layers[0]: must have the keys name, parameters, forward_ms,"),
        ({"fits": [{"layer": "a"}]}, "fits[0]: must have the keys layer, way, fixed_ms,"),
        ({"fits": [{**FIT, "fixed_ms": 1}]}, "fits[0].fixed_ms: must have the keys median,"),
        (
            {"fits": [{**FIT, "fixed_ms": {**ENDS, "low": -1}}]},
            "fits[0].fixed_ms.low=-1: must be null or a number of at least 0",
        ),
        ({"colour": 1}, "colour=1: no such key; allowed: name, source, reference_batch,"),
        ({"layers": [*LAYERS, LAYERS[0]]}, "layers[2].name=conv: appears twice"),
        ({"layers": [{**LAYERS[0], "name": "a.b"}]}, "layers[0].name=a.b: use only letters"),
        ({"layers": [{"name": "a"}]}, "layers[0].parameters: is missing"),
        (
            {"layers": [{**LAYERS[0], "parameters": 1.5}]},
            "layers[0].parameters=1.5: must be an integer of at least 0",
        ),
        (
            {"layers": [{**LAYERS[0], "backward_ms": -1}]},
            "layers[0].backward_ms=-1: must be a number of at least 0",
        ),
        (
            {"layers": [{**LAYERS[0], "fixed_forward_ms": 5}]},
            "layers[0].fixed_forward_ms=5: must be from 0 to forward_ms=4.0",
        ),
    ],
)
def test_refuses_in_one_line(change: dict[str, Any], message: str) -> None:
    with refusing(f"profile=small: {message}"):
        Profile.parse({**NODE, **change})


def test_refuses_what_is_no_profile_at_all() -> None:
    with pytest.raises(ValueError, match="^profile=3: must have the keys name, source"):
        Profile.parse(3)  # type: ignore[arg-type]
