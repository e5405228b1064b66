"""Results of benchmarks: their tables, and charts that can be read, from the JSON alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lab.benchmarks import certificate, host, memory
from lab.benchmarks.harness import difference, level, middle, ratio
from lab.benchmarks.present import chart_of, fastest, is_result, text_of, write
from lab.draw.chart import Chart, drawn
from tests.conftest import ROOT
from tests.support.svg import outside, overlapping

RESULTS = ROOT / "docs/results"
COMMITTED = {
    "aa": "aa",
    "memory": "exchange/memory",
    "step": "exchange/step_fc_2",
    "collective": "exchange/collective_4",
    "codec": "beyond/codec",
    "recording": "recording",
    "straggler": "beyond/straggler",
    "layers": "layers/layers_alexnet_one",
    "throughput": "layers/throughput_resnet50",
    "convolution": "layers/convolution_vgg16",
    "layout": "layers/layout_alexnet",
    "counters": "layers/counters_alexnet",
    "footprint": "layers/footprint",
    "roofline": "layers/roofline_resnet50",
}
MESSAGES = {
    "aa": "5 of 200 pairs of equal candidates differ significantly at the 95 % level",
    "memory": "Peak memory on 2 ranks is 0.98 to 1.08 × theory",
    "step": "onebit is fastest: 0.80 × ddp's step time",
    "collective": (
        "None is significantly faster than the library; ring takes 1.03 × its time, at 64 MiB"
    ),
    "codec": (
        "Encoding takes 0.524 (fp16) to 72.2 (grace_like) times as long as torch.add(a, b, out=c)"
    ),
    "host": "Exchanges cost the training thread 1.00 × DDP's host time",
    "layers": "Conv2d takes 68 % of a step of alexnet at a batch of 16",
    "throughput": "Training resnet50 gains less than 5 % beyond a batch of 16",
    "layers/compile_resnet50": (
        "Training resnet50: compile=True is 1.26 × as fast as compile=False"
    ),
    "layers/convolution_googlenet": (
        "Convolutions of googlenet: the best of each pass takes 0.97 × the library's time"
    ),
    "layout": (
        "Steps of alexnet_paper with 16 images: None is significantly faster than NCHW; mixed "
        "takes 0.97 × its time"
    ),
    "counters": "28 % of the instructions of alexnet_paper load or store, at a batch of 4",
    "footprint": (
        "A step of alexnet, googlenet, vgg16, vgg19 takes 984 to 21,837 MB, 22 to 99 % of it "
        "activations"
    ),
    "roofline": "Layers of resnet50 reach 36 % of what the roofs allow",
}


def memory_answer(name: str, peak: float, theory: float | None) -> dict[str, Any]:
    peaks = [{"median": peak - 5e6, "mad": 0.0}, {"median": peak, "mad": 1e5}]
    row = {"name": name, "peak_bytes": peaks, "extra_theory_bytes": [theory, theory]}
    row["optimizer_bytes"] = [1e6, peak / 10]
    return {**SURROUNDINGS, "rows": [{**row, "num_steps": 7, "num_parameters": 10**7}]}


SURROUNDINGS = {
    "command": "python -m lab.bench",
    "world_size": 2,
    "backend": "gloo",
    "emulation": "2 threads of 2 ranks share 1 CPU cores",
    "environment": {"gpus": [], "cpu": "a CPU", "num_cores": 1, "num_threads": 1, "torch": "2"},
}


def results() -> dict[str, dict[str, Any]]:
    """Make small results of benchmarks that no committed one shows, and of memory."""
    answers = [memory_answer("none", 3e8, 1e7), memory_answer("gossip", 4e8, None)]
    combined = memory.combine([*answers, memory_answer("tree", 3.5e8, 4e7)])
    rng = np.random.default_rng(0)
    times = {name: rng.random((3, 9))[i] + i for i, name in enumerate(("none", "tree", "ddp"))}
    took, times_ms = times["ddp"], {name: middle(1e-3 * each) for name, each in times.items()}
    cost = certificate.cost([0.3, 0.6, 0.3], [0.4, 0.7, 0.35])
    checked = {"name": "onebit", "line": "certificate: all is well", **cost}
    sides = {"ratio": ratio(took, took), "added_s": difference(took, took)}
    marked, without = ({"name": n, "step_s": middle(took)} for n in ("with marks", "without"))
    of_marks = {"num_pairs": 9, "num_buckets": 4, "marks_s": 2e-5}
    scattered = {"algorithm": "torch", "size_bytes": 4096, "wrong": 0, "crossed_share": None}
    scattered |= {"time_s": times_ms["ddp"], "ratio_to_torch": ratio(took, took)}
    added = {"added_s": level(1e-4 * took), "over_ddp": ratio(took, took)}
    of_host = {"plain_s": times_ms["tree"], "num_parameters": 6, "num_ranks": 8}
    hosts = [{"name": name, **added} for name in (host.DDP, "overlap")]
    own = {
        "memory": combined,
        "certificate": {"rows": [checked], "num_rounds": 3},
        "marks": {"rows": [marked | sides, without], **of_marks},
        "reduce_scatter": {"rows": [scattered], "num_rounds": 9},
        "host": {"rows": hosts, **of_host, "num_rounds": 9},
    }
    return {name: {**SURROUNDINGS, **each} for name, each in own.items()}


def committed(name: str) -> dict[str, Any]:
    """Read a result in docs/results by its benchmark or file; others are made up."""
    if name in COMMITTED or "/" in name:
        return json.loads((RESULTS / f"{COMMITTED.get(name, name)}.json").read_text())
    return json.loads(json.dumps({"bench": name, **results()[name]}, allow_nan=False))


def readable(result: dict[str, Any]) -> Chart:
    """Draw a result: no text hides another or leaves the picture."""
    chart = chart_of(result)
    assert chart
    svg = drawn(chart.spec(), "svg").decode()
    assert overlapping(svg) == [] and outside(svg) == []
    return chart


def chart_in(path: Path) -> Chart:
    """Draw the result in a file."""
    return readable(json.loads(path.read_text()))


def of_few_rounds(found: Any) -> Any:
    """Leave out the ends of all intervals."""
    if isinstance(found, list):
        return [of_few_rounds(each) for each in found]
    if not isinstance(found, dict):
        return found
    return {k: None if k in ("low", "high") else of_few_rounds(v) for k, v in found.items()}


@pytest.mark.parametrize("name", [*COMMITTED, "certificate", "marks", "reduce_scatter", "host"])
def test_a_result_is_shown_whole_from_its_json_alone(name: str) -> None:
    golden = Path(__file__).parent / "golden" / f"{name}.txt"
    assert text_of(committed(name)) + "\n" == golden.read_text()


@pytest.mark.parametrize("name", MESSAGES)
def test_a_chart_says_what_it_shows_and_no_text_hides_another(name: str) -> None:
    assert readable(committed(name)).message == MESSAGES[name]


def test_a_chart_of_one_candidate_compares_it_with_nothing() -> None:
    alone = committed("collective")
    alone["rows"] = [row for row in alone["rows"] if row["algorithm"] in ("allreduce", "sendrecv")]
    assert readable(alone).message == "Bus bandwidth of the library's all-reduce on 4 ranks"
    alone = committed("throughput")
    alone["rows"], alone["knees"] = alone["rows"][:1], {}
    rate = alone["rows"][0]["training"]["median"]
    assert readable(alone).message == f"Training resnet50 reaches {rate:.3g} images per second"


@pytest.mark.slow
def test_no_text_hides_another_in_any_committed_figure() -> None:
    files = [path for path in (ROOT / "docs/results").rglob("*.json") if "pages" not in path.parts]
    found = [each for path in files if is_result(each := json.loads(path.read_text()))]
    assert len([readable(each) for each in found if chart_of(each)]) > 30


@pytest.mark.parametrize("name", ["memory", "step", "collective", "codec", "host"])
def test_what_is_unknown_is_no_number_and_emulation_is_told(name: str) -> None:
    found = results()[name] if name == "memory" else of_few_rounds(committed(name))
    result = {"bench": name, **found, "emulation": SURROUNDINGS["emulation"]}
    assert "nan" not in text_of(result)
    assert "emulated: 2 threads of 2 ranks share 1 CPU cores" in text_of(result)
    chart = chart_of(result)
    assert chart and "Emulated: 2 threads of 2 ranks share 1 CPU cores." in chart.sentences
    assert drawn(chart.spec(), "svg")


def test_a_message_says_no_more_than_intervals_do() -> None:
    def of(*ends: float | None) -> dict[str, float | None]:
        return dict(zip(("low", "median", "high"), ends, strict=True))

    far = of(1.5, 1.6, 1.7)
    assert fastest({"a": of(0.7, 0.8, 0.9), "b": far}, "ddp") == "a is fastest: 0.80 × ddp's time"
    # Each of ten is below 1 by itself; that one of ten equal ones is so is no wonder.
    near = of(0.9, 0.95, 0.999)
    assert fastest({"a": near}, "ddp") == "a is fastest: 0.95 × ddp's time"
    ten = {f"c{at}": near for at in range(10)}
    assert fastest(ten, "ddp").startswith("None is significantly faster than ddp")
    both = {"a": of(0.5, 0.85, 1.4), "b": of(0.88, 0.9, 0.92)}
    assert fastest(both, "ddp") == "b is fastest: 0.90 × ddp's time"  # a may be none
    beats = "All are slower than ddp: b, the nearest, takes 1.60 × its time"
    assert fastest({"b": far}, "ddp") == beats
    assert fastest({"a": of(0.9, 0.99, 1.1)}, "ddp").startswith(
        "None is significantly faster than ddp"
    )
    assert fastest({"a": of(None, 0.5, None)}, "ddp").startswith("Too few rounds to be sure: ")


def test_a_benchmark_without_a_chart_writes_its_result_alone(tmp_path: Path) -> None:
    assert write(tmp_path / "a.json", committed("recording")) == [tmp_path / "a.json"]
    assert json.loads((tmp_path / "a.json").read_text()) == committed("recording")
