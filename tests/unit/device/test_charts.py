"""Committed results of each benchmark of one device: their tables, and charts that can be read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lab.benchmarks.present import chart_of, text_of
from lab.draw.chart import Chart, drawn
from tests.conftest import ROOT
from tests.support.svg import outside, overlapping

RESULTS = ROOT / "docs/results"
TABLED = {
    "layers": "layers_alexnet_one",
    "throughput": "throughput_resnet50",
    "convolution": "convolution_vgg16",
    "layout": "layout_alexnet",
    "counters": "counters_alexnet",
    "footprint": "footprint",
    "roofline": "roofline_resnet50",
}
MESSAGES = {
    "layers/layers_alexnet_one": "Conv2d takes 68 % of a step of alexnet at a batch of 16",
    "gpu-h100/layers_128": "Conv2d takes 75 % of a step of alexnet at a batch of 128",
    "layers/throughput_resnet50": "Training resnet50 gains less than 5 % beyond a batch of 16",
    "layers/compile_resnet50": (
        "Training resnet50: compile=True is 1.26 × as fast as compile=False"
    ),
    "layers/convolution_googlenet": (
        "Convolutions of googlenet: the best of each pass takes 0.97 of the library's time"
    ),
    "layers/layout_alexnet": (
        "Steps of alexnet_paper with 16 images: None is significantly faster than NCHW; mixed "
        "takes 0.97 of its time"
    ),
    "layers/counters_alexnet": (
        "28 % of the instructions of alexnet_paper load or store, at a batch of 4"
    ),
    "layers/footprint": (
        "A step of alexnet, googlenet, vgg16, vgg19 takes 984 to 21837 MB, 22 to 99 % of it "
        "activations"
    ),
    "layers/roofline_resnet50": "Layers of resnet50 reach 36 % of what the roofs allow",
}


def chart_in(path: Path) -> Chart:
    """Draw the result in a file: no text hides another or leaves the picture."""
    result: dict[str, Any] = json.loads(path.read_text())
    chart = chart_of(result)
    assert chart
    svg = drawn(chart.spec(), "svg").decode()
    assert overlapping(svg) == [] and outside(svg) == []
    return chart


@pytest.mark.parametrize("bench", TABLED)
def test_a_result_is_shown_whole_from_its_json_alone(bench: str) -> None:
    result = json.loads((RESULTS / "layers" / f"{TABLED[bench]}.json").read_text())
    golden = Path(__file__).parent / "golden" / f"{bench}.txt"
    assert text_of(result) + "\n" == golden.read_text()


@pytest.mark.parametrize("name", MESSAGES)
def test_a_chart_says_what_it_shows_and_no_text_hides_another(name: str) -> None:
    assert chart_in(RESULTS / f"{name}.json").message == MESSAGES[name]
