"""Claims about one device: what is counted, what lab.bench and a study measured, and verdicts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lab import verify
from lab.claims.claims import Paper
from lab.claims.device import DevicePaper, difference, exact, networks, ratio, total
from lab.claims.findings import judge
from lab.claims.findings import verify as verify_paper
from lab.measure.statistics import Interval
from tests.support.commands import refusal, said
from tests.support.records import leave, make_record

NETWORKS = {
    "lenet": "model=lenet data=synthetic data.shape=[1,28,28]",
    "one": "model=lstm task=language_modelling data=synthetic_tokens data.context=1 model.layers=1",
    "two": "model=lstm task=language_modelling data=synthetic_tokens data.context=1 model.layers=2",
}
LENET = {"network": "lenet"}
CONV1 = {**LENET, "layer": "features.0"}


def spread(median: float) -> dict[str, float]:
    return {"median": median, "low": 0.9 * median, "high": 1.1 * median}


def layer(name: str, kind: str, forward_s: float, backward_s: float) -> dict[str, Any]:
    passes = {"forward_s": spread(forward_s), "backward_s": spread(backward_s)}
    bias_s = {"forward": spread(0.1), "backward": spread(0.3)} if kind == "Conv2d" else None
    return {"name": name, "kind": kind, "bias_s": bias_s, **passes}


def convolved(name: str, direction: str, algorithm: str, seconds: float | None) -> dict[str, Any]:
    times = {"time_s": seconds and {"median": seconds}, "ratio": seconds and spread(seconds / 2)}
    place = {"layer": name, "pass": direction, "is_first": name == "a", "count": 2}
    return {**place, "algorithm": algorithm, **times}


def counted(name: str, batch: int, direction: str) -> dict[str, Any]:
    events = {"instructions": 100 * batch, "loads": 20 * batch, "stores": 10 * batch}
    misses = {"l1_load_misses": 10 * batch, "l2_load_misses": batch}
    place = {"layer": name, "kind": "Conv2d", "pass": direction, "batch_size": batch}
    return {**place, **events, **misses, "l1_store_misses": 4 * batch, "l2_store_misses": 3 * batch}


LAYERS = {
    "layers": [
        layer("a", "Conv2d", 1.0, 2.0),
        layer("b", "ReLU", 0.5, 0.5),
        layer("c", "MaxPool2d", 0.2, 0.4),
    ]
}
RESULTS: dict[str, dict[str, Any]] = {
    "layers": {"rows": [{"step_s": {"median": 10.0}, "input_grad_s": spread(1.0), **LAYERS}]},
    "convolution": {
        "rows": [
            convolved("a", "forward", "library", 2.0),
            convolved("a", "forward", "fft", 1.0),
            convolved("a", "backward data", "library", 2.0),
            convolved("b", "forward", "library", 2.0),
            convolved("b", "forward", "fft", None),
        ]
    },
    "counters": {
        "rows": [counted("a", batch, way) for batch in (2, 4) for way in ("forward", "backward")],
        "slowdown": 300.0,
    },
    "throughput": {
        "rows": [
            {"name": "1", "training": spread(4.0), "products_share": 0.7},
            {"name": "2", "training": spread(6.0), "products_share": None},
        ]
    },
    "layout": {"steps": [{"layout": "NCHW", "ratio": spread(1.0)}], "rows": []},
    "roofline": {"rows": [{"loose_bytes": 1, "num_bytes": 3}, {"loose_bytes": 1, "num_bytes": 5}]},
}


COUNTERS, RATES = {"result": "counters"}, {"result": "throughput"}


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> DevicePaper:
    folder = tmp_path_factory.mktemp("results")
    where = {"environment": {"cpu": "c", "torch": "t"}, "git_commit": None, "command": "x"}
    for name, result in RESULTS.items():
        (folder / f"{name}.json").write_text(json.dumps({"bench": name, **where, **result}))
    return DevicePaper(NETWORKS, {name: f"{name} model=x" for name in [*RESULTS, "absent"]}, folder)


def paper(claim: dict[str, Any]) -> Paper:
    right = {"says": "s", "source": "1", "check": {"at_least": 1}}
    return Paper.parse({"title": "t", "claims": [right | claim]})


def found(device: DevicePaper, quantity: str, at: dict[str, Any], **claim: Any) -> Interval | None:
    (one,) = paper({"quantity": quantity, "at": at, **claim}).claims
    return one.found(device)


@pytest.mark.parametrize(
    ("quantity", "at", "value"),
    [
        ("parameters", LENET, 431_080),
        ("weight_layers", LENET, 4),
        ("fc_parameter_share", LENET, (801 * 500 + 501 * 10) / 431_080),
        ("network_operations", {**LENET, "layers": "Linear"}, 2 * (400_000 + 5_000)),
        ("refusals", {**LENET, "algorithm": "winograd4x3"}, 2),
        ("executed_share", {**CONV1, "algorithm": "direct"}, 1),
        ("executed_share", {**CONV1, "algorithm": "gemm", "tile": 32}, 32 / 20),  # 20 filters
        ("operations_per_output", {"algorithm": "direct", "kernel": 3}, 18),
    ],
)
def test_counts(device: DevicePaper, quantity: str, at: dict[str, Any], value: float) -> None:
    counted = found(device, quantity, at)
    assert counted and counted == exact(counted.mid) and counted.mid == pytest.approx(value)


def test_counts_that_are_refused_or_differ_elsewhere(device: DevicePaper) -> None:
    assert found(device, "executed_share", {**CONV1, "algorithm": "winograd4x3"}) is None
    larger = found(device, "step_bytes", {**LENET, "batch_size": 64}, over={"batch_size": 8})
    assert larger and larger.mid > 1
    added = found(device, "network_operations", {"network": "two"}, less={"network": "one"})
    assert added == exact(16 * 256**2)


@pytest.mark.parametrize(
    ("quantity", "at", "ends"),
    [
        ("time_share", {"result": "layers", "layers": "Conv2d"}, (0.27, 0.3, 0.33)),
        # Biases 0.4, ReLU 1, pooling 0.6.
        ("bias_and_share", {"result": "layers", "layers": "ReLU"}, (0.63 / 1.1, 0.7, 0.77 / 0.9)),
        ("backward_ratio", {"result": "layers", "layers": "b"}, (0.9 / 1.1, 1.0, 1.1 / 0.9)),
        ("input_grad_share", {"result": "layers"}, (0.09, 0.1, 0.11)),
        # Backward data of the first layer counts nowhere, and the library stands in for a refusal.
        ("algorithm_time", {"result": "convolution", "algorithm": "fft"}, (5.4, 6.0, 6.6)),
        ("algorithm_time", {"result": "convolution", "algorithm": "library"}, (7.2, 8.0, 8.8)),
        ("algorithm_time", {"result": "convolution", "algorithm": "best of each"}, (5.4, 6.0, 6.6)),
        ("access_share", {**COUNTERS, "layers": "a"}, (0.3,) * 3),
        ("hit_rate", {**COUNTERS, "layers": "Conv2d", "level": 1}, (0.5,) * 3),
        ("hit_rate", {**COUNTERS, "layers": "a", "level": 2}, (0.9,) * 3),
        ("hit_rate", {**COUNTERS, "layers": "a", "level": 2, "access": "store"}, (0.25,) * 3),
        ("slowdown", COUNTERS, (300.0,) * 3),
        ("bench_samples_per_s", {**RATES, "name": "2"}, (5.4, 6.0, 6.6)),
        ("products_share", {**RATES, "name": "1"}, (0.7,) * 3),
        ("fusable_share", {"result": "roofline"}, (0.25,) * 3),
        ("layout_ratio", {"result": "layout", "layout": "NCHW"}, (0.9, 1.0, 1.1)),
    ],
)
def test_measured_quantities(
    device: DevicePaper, quantity: str, at: dict[str, Any], ends: tuple[float, float, float]
) -> None:
    value = found(device, quantity, at)
    assert value and (value.lo, value.mid, value.hi) == pytest.approx(ends)


def test_a_ratio_to_elsewhere_is_as_wide_as_both(device: DevicePaper) -> None:
    at = {**COUNTERS, "event": "instructions", "layers": "a", "batch": "4"}
    assert found(device, "counted_events", at, over={"batch": "2"}) == exact(2.0)
    rates = found(device, "bench_samples_per_s", {**RATES, "name": "2"}, over={"name": "1"})
    assert rates and (rates.lo, rates.mid) == pytest.approx((5.4 / 4.4, 1.5))


def test_arithmetic_of_intervals() -> None:
    one, two = Interval(0.9, 1, 1.1), Interval(1.8, 2, 2.2)
    assert total([one, two]) == Interval(0.9 + 1.8, 3, 1.1 + 2.2)
    assert difference(two, one) == Interval(1.8 - 1.1, 1, 2.2 - 0.9)
    assert ratio(one, two) == Interval(0.9 / 2.2, 0.5, 1.1 / 1.8)


@pytest.mark.parametrize(
    ("quantity", "at"),
    [
        ("slowdown", {"result": "absent"}),
        ("products_share", {**RATES, "name": "2"}),
        ("mini_batch_s", {"model": "lenet", "threads": 1}),
    ],
)
def test_what_nothing_measured_is_unknown(
    device: DevicePaper, quantity: str, at: dict[str, Any]
) -> None:
    (verdict,) = judge(paper({"quantity": quantity, "at": at}), None, None, device=device)
    assert verdict.outcome == "unknown"


@pytest.mark.parametrize(
    ("quantity", "at", "message"),
    [
        ("parameters", {"network": "x"}, "'s': network=x: allowed: lenet, one, two"),
        ("slowdown", {"result": "x"}, "'s': result=x: allowed: layers, convolution"),
        ("slowdown", {"results": "x"}, "'s': .*results"),
        ("bench_samples_per_s", {**RATES, "name": "3"}, "'s': name=3: allowed: 1, 2"),
        ("time_share", {"result": "layers", "layers": "x"}, "'s': layers=x: there is no such"),
    ],
)
def test_a_wrong_argument_names_its_claim(
    device: DevicePaper, quantity: str, at: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        found(device, quantity, at)


def test_a_file_of_another_benchmark_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"bench": "codec"}')
    with pytest.raises(ValueError, match="must be a result of lab.bench counters"):
        DevicePaper(benches={"a": "counters model=x"}, folder=tmp_path).result("a")


def test_a_study_measures_pairs_of_cells(tmp_path: Path) -> None:
    runs = tmp_path / "shi2016"
    for repeat in range(3):
        for model, threads, step_s in (("lstm", 1, 1.8), ("lstm", 2, 1.0), ("resnet56", 1, 3.6)):
            record = make_record("none", 1, step_s * (1 + 0.01 * repeat), model=model)
            record.repeat, record.variant = repeat, {"model": model, "threads": str(threads)}
            leave(runs / f"{model}-{threads}-{repeat}", record)
    words = ("shi2016", f"runs={runs}", f"out={tmp_path}/page.md")
    lines = said(verify.main, *words, code=1).splitlines()
    faster = next(line for line in lines if line.startswith("| LSTM: two threads"))
    assert "1.8 [1.8, 1.8]" in faster and "measured: agrees" in faster
    longer = next(line for line in lines if "one of ResNet-56: " in line)
    assert "measured: differs by" in longer  # the LSTM was faster here
    assert sum("not testable here: not measured |" in line for line in lines) == 17
    networks = [line for line in lines if line.startswith("| LSTM | 128 | 6.921, 3.831 | 0.186 to")]
    assert networks == [line for line in lines if "| 0.017 (CNTK, GTX 1080) | 1.82 [" in line]
    assert "mini_batches.png" in (tmp_path / "page.md").read_text()
    assert (tmp_path / "page/mini_batches.png").is_file()


def test_a_wrong_table_names_its_network() -> None:
    with pytest.raises(ValueError, match="table: LSTM: 'tools'"):
        networks({"LSTM": {"model": "lstm"}}, DevicePaper())
    seconds = {"desktop": [1.0, None, 1.0, 1.0], "server": [1.0] * 6, "gpu": [1.0] * 3}
    for wrong, message in [
        ({"gpu": [1.0]}, r"LSTM: Torch: gpu=\[1.0\]: must have 3 entries, null for no figure"),
        ({"server": ["a"] * 6}, "LSTM: Torch: server=a: must be a number above 0"),
    ]:
        entry = {"model": "lstm", "batch_size": 4, "tools": {"Torch": seconds | wrong}}
        with pytest.raises(ValueError, match=message):
            networks({"LSTM": entry}, DevicePaper())


def test_all_papers_are_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "choices_of", lambda *_: ("nvidia2017", "shi2016"))
    lines = said(verify.main, "all").splitlines()
    assert lines[2].startswith("| not tested: we have no measurement | 20 | – | – | – |")
    nvidia, shi = (line.split("|")[2:-1] for line in lines[-2:])
    assert [cell.strip() for cell in nvidia] == ["–", "29", "–", "–"]
    assert [cell.strip() for cell in shi] == ["20", "10", "–", "–"]
    assert refusal(verify.main, "kim2017", f"runs={__file__}").startswith("runs=")
    assert refusal(verify.main, "shi2016", "shi2016").endswith("the same paper is named twice")
    line = refusal(verify.main, "all", "out=page.md")
    assert line == "all: it allows neither other papers nor out=; name the papers instead"


def test_claims_on_scaling_need_a_machine() -> None:
    with pytest.raises(ValueError, match="claim 's': needs a profile and hardware"):
        paper({"quantity": "speedup"})


def test_published_figures_of_counts_hold() -> None:
    found = verify_paper("levinthal2018").verdicts
    counts = [each for each in found if each.claim.is_counted and each.claim.published]
    assert len(counts) == 7 and all(each.outcome == "holds" for each in counts)
