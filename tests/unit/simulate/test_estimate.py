"""Estimates: a roofline by hand, and predictions that say what they are."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from omegaconf import OmegaConf
from torch import nn

from lab import predict
from lab.claims.predicted import profile_of
from lab.measure import operations
from lab.model.profile import Profile
from lab.model.work import LayerWork, Line, Operation, Work
from lab.settings.config import load
from lab.settings.files import read_file
from lab.settings.names import resolved
from lab.simulate import estimate as source
from lab.simulate import view
from lab.simulate.estimate import Estimate
from lab.simulate.hardware import Device, Hardware
from lab.simulate.predict import plain, predicted, read
from lab.simulate.step import simulate
from lab.simulate.strategy import CEILING, parameters, update_note, update_of
from lab.sync.pattern import Update
from tests.support import refusing
from tests.support.commands import said
from tests.support.records import leave, make_record
from tests.support.simulated import FLAT, strategy

DEVICE = Device(
    "made up",
    "this test",
    (("fp32", 1e9), ("bf16", 4e9)),
    bandwidth_bytes_per_s=1e9,
    compute_efficiency=0.5,
    memory_efficiency=0.1,
    op_s=1e-3,
    op_rates=(("pool", 1e6),),
)
NONE = Line(0.0, 0.0)
PRODUCT = Operation("product", Line(0.0, 1e7), Line(4e4, 1e3))
RELU = Operation("relu", NONE, Line(0.0, 1e5))
POOL = Operation("pool", NONE, Line(0.0, 1e3))
WORK = Work((LayerWork("a", 500, (PRODUCT, RELU), (PRODUCT,)), LayerWork("b", 0, (POOL,), ())), 50)


def test_an_operation_takes_the_longer_of_products_and_bytes() -> None:
    profile = Estimate(WORK, "fp32", (2, 8), "mine").profile_of(DEVICE)
    a, b = profile.layers
    for batch in (2, 8):
        product_s = 1e-3 + batch * 1e7 / 5e8
        relu_s = 1e-3 + batch * 1e5 / 1e8
        assert profile.forward_s(a, batch) == pytest.approx(product_s + relu_s)
        assert profile.backward_s(a, batch) == pytest.approx(product_s)
        assert profile.forward_s(b, batch) == pytest.approx(1e-3 + batch * 1e3 / 1e6)
        gather_s = 2 * 50 * batch / 1e8
        assert profile.rest_s(batch) == pytest.approx(2e-3 + gather_s)
    assert [layer.parameters for layer in profile.layers] == [500, 0]
    assert profile.source.startswith("estimate: 2e+07 FLOP per sample")


ADAM = Update(7.0, 7.0, 2.0)


def test_an_update_takes_its_optimizers_passes_over_float32_at_any_precision() -> None:
    pass_s = 4 * 500 / 1e8
    for precision in ("fp32", "bf16"):
        profile = Estimate(WORK, precision, (2, 8), "mine").profile_of(DEVICE)
        layers_s, rest_s = profile.compute_s(8), 2e-3 + 2 * 50 * 8 / 1e8
        for way, passes in ((CEILING, 5), (replace(CEILING, update=ADAM), 7)):
            step_s = simulate(profile, FLAT, way, 1, 8).step_s
            assert step_s == pytest.approx(layers_s + rest_s + passes * pass_s)


def test_ranks_that_share_the_update_pass_over_their_part_alone() -> None:
    profile = Estimate(WORK, "fp32", (2, 8), "mine").profile_of(DEVICE)
    fast = replace(profile, update_bytes_per_s=1e18)
    for name, passes in (("zero1", 5), ("fsdp", 11), ("allreduce", 4 * 5)):
        with_update, without = (
            simulate(each, FLAT, strategy(name), 4, 8).step_s for each in (profile, fast)
        )
        assert with_update - without == pytest.approx(passes * 4 * 500 / 4 / 1e8)


def test_a_measured_profile_contains_sgd_and_others_differ_from_it() -> None:
    bare = replace(Estimate(WORK, "fp32", (2, 8), "mine").profile_of(DEVICE), rest_ms=10.0)
    profile = replace(bare, update_bytes_per_s=None)
    node = replace(FLAT, device=DEVICE)

    def step_s(passes: float, hardware: Hardware = node) -> float:
        way = replace(CEILING, update=Update(passes, passes, 1.0))
        return simulate(profile, hardware, way, 1, 8).step_s

    sgd_s = simulate(profile, node, CEILING, 1, 8).step_s
    assert step_s(7) == pytest.approx(sgd_s + 2 * 4 * 500 / 1e8)
    assert step_s(3) == pytest.approx(sgd_s - 2 * 4 * 500 / 1e8)
    assert step_s(7, replace(node, device=None)) == sgd_s


def test_a_profile_may_say_what_its_own_optimizer_passes_over() -> None:
    bare = replace(Estimate(WORK, "fp32", (2, 8), "mine").profile_of(DEVICE), rest_ms=10.0)
    measured = {"update_bytes_per_s": None, "update_passes": 12.0}
    lamb = Profile.parse(yaml.safe_load(replace(bare, **measured).to_yaml()))
    node, adam = replace(FLAT, device=DEVICE), replace(CEILING, update=ADAM)
    (with_lamb_s, with_adam_s), same_s = (
        [simulate(lamb, node, way, 1, 8).step_s for way in (CEILING, adam)],
        simulate(lamb, node, replace(CEILING, update=Update(12.0, 12.0, 2.0)), 1, 8).step_s,
    )
    assert with_lamb_s == pytest.approx(same_s - 7 * 4 * 500 / 1e8)
    assert with_adam_s == pytest.approx(same_s - 5 * 4 * 500 / 1e8)
    note = update_note("torch.optim.AdamW", lamb, node, adam)
    assert "mine contains an update of 12 passes; the difference changes a step by -0.10 ms" in note
    assert update_note("mine.Lamb", lamb, node, replace(CEILING, update=Update(12, 12, 2))) == ""


def test_an_updates_matrix_products_take_time() -> None:
    profile = profile_of("alexnet_titanx", 0.02)
    muon = update_of({"_target_": "torch.optim.Muon", "lr": 0.1})
    assert muon and muon.operations == 30
    rows = [s for s in parameters(profile).values() if len(s) > 1]
    operations = 30 * sum(math.prod(shape) * min(shape) for shape in rows)
    node = replace(FLAT, codec_bytes_per_s=1e9)
    steps = [
        simulate(profile, node, replace(CEILING, update=each), 1, 8).step_s
        for each in (muon, replace(muon, operations=0.0))
    ]
    assert steps[0] - steps[1] == pytest.approx(operations / 1e10)
    # A profile that was measured with it contains them.
    own = replace(profile, update_passes=muon.passes)
    assert simulate(own, node, replace(CEILING, update=muon), 1, 8).step_s == pytest.approx(
        simulate(own, node, CEILING, 1, 8).step_s
    )


def test_another_optimizer_moves_a_prediction_and_says_by_how_much() -> None:
    words = "strategy=none", "world_size=1", "hardware=h200_x8", "profile=alexnet_h100"
    sgd, adam = (result_of(*words, f"optim={name}") for name in ("sgd", "adamw"))
    more_s = 2 * 61_100_840 * 4 / (0.9 * 4.8e12)
    assert adam["rows"][0]["step_s"] == pytest.approx(sgd["rows"][0]["step_s"] + more_s, rel=1e-3)
    assert sgd["updates"] == []
    line = (
        "optim=torch.optim.AdamW: an update makes 7 passes over memory; alexnet_h100 is assumed to "
    )
    assert line in view.table(adam) and "a step by +0.11 ms, at 4320 GB/s" in view.table(adam)
    with refusing("optim=torch.optim.LBFGS: its step cannot be counted"):
        result_of("strategy=none", "model=lenet", "world_size=1", "optim=torch.optim.LBFGS")


def test_half_precision_has_its_own_peak_and_half_the_bytes() -> None:
    a, _ = Estimate(WORK, "bf16", (2, 8), "mine").profile_of(DEVICE).layers
    assert a.backward_ms == pytest.approx(1 + 8 * 1e7 / 2e9 * 1e3)
    assert a.forward_ms - a.backward_ms == pytest.approx(1 + 8 * 1e5 / 2 / 1e8 * 1e3)
    with pytest.raises(ValueError, match=r"precision=fp16: .* of made up has only fp32, bf16"):
        Estimate(WORK, "fp16", (2, 8), "mine").profile_of(DEVICE)


def test_an_efficiency_may_be_of_one_precision_and_operation() -> None:
    alike = replace(DEVICE, op_efficiency=(("product", 0.25), ("bf16", 0.5)))
    own = replace(alike, op_efficiency=(*alike.op_efficiency, ("bf16.product", 1.0)))
    for device, share in ((alike, 0.25 * 0.5), (own, 0.5)):
        a, _ = Estimate(WORK, "bf16", (2, 8), "mine").profile_of(device).layers
        assert a.backward_ms == pytest.approx(1 + 8 * 1e7 / (share * 2e9) * 1e3)
    fp32, _ = Estimate(WORK, "fp32", (2, 8), "mine").profile_of(own).layers
    assert fp32.backward_ms == pytest.approx(1 + 8 * 1e7 / (0.25 * 5e8) * 1e3)


def test_what_fits_into_the_cache_moves_at_its_rate() -> None:
    cached = replace(DEVICE, cache_bytes=3e5, cache_bytes_per_s=1e10)
    a, _ = Estimate(WORK, "fp32", (2, 2), "mine").profile_of(cached).layers  # batches of 2 and 4
    relu_ms = a.forward_ms - a.backward_ms
    assert relu_ms == pytest.approx(1 + 4 * 1e5 / 1e8 * 1e3)  # 400 kB do not fit
    assert a.fixed_forward_ms - a.fixed_backward_ms < 0.5  # half of them do


def test_ranks_that_share_cores_slow_each_others_compute() -> None:
    shared = replace(FLAT, num_cores=2, crowding=0.5)
    profile = Estimate(WORK, "fp32", (8, 16), "mine").profile_of(replace(DEVICE, num_threads=1))
    alone, four = (simulate(profile, shared, CEILING, size, 8).step_s for size in (1, 4))
    assert four == pytest.approx(2 * 1.5 * alone)
    own = replace(profile, num_threads=None)
    rest_s = (own.rest_s(8) or 0.0) + 5 * 4 * 500 / 1e8
    assert simulate(own, shared, CEILING, 4, 8).step_s == pytest.approx(alone + 2 * rest_s)


def test_a_profile_predicts_its_own_step() -> None:
    node = {**read_file("profile", "alexnet_titanx"), "rest_ms": 12.5, "step_ms": 212.5}
    profile = Profile.parse(node)
    step = simulate(profile, FLAT, CEILING, 1, profile.reference_batch)
    assert 1e3 * step.step_s == pytest.approx(212.5, rel=1e-3)
    # The rest includes the update: a rate of the hardware's does not come on top.
    slow = replace(FLAT, update_bytes_per_s=1e6)
    assert simulate(profile, slow, CEILING, 1, profile.reference_batch) == step


def result_of(*words: str) -> dict[str, Any]:
    return predicted(read(words))[0]


def test_without_model_and_profile_the_papers_alexnet_is_said_to_be_meant() -> None:
    result = result_of("strategy=none")
    assert result["profiles"].keys() == {"alexnet_titanx"}
    assert "neither a model nor a profile was given, so profile=alexnet_titanx" in view.table(
        result
    )
    given = result_of("strategy=none", "profile=resnet50_p100")
    assert given["profiles"].keys() == {"resnet50_p100"}
    assert "neither" not in view.table(given) and "estimate" not in view.table(given)


def test_a_model_without_a_profile_is_estimated_and_says_so() -> None:
    result = result_of("strategy=none", "model=lenet", "batch_size=64", "world_size=1,2")
    assert {row["basis"] for row in result["rows"]} == {"estimate"}
    (name,) = result["profiles"]
    assert name == "lenet, 0.02035 GFLOP per sample (estimate)"
    assert result["profiles"][name] == 4 * 656_080  # and not AlexNet's
    text = view.table(result)
    assert "predicted: estimate lenet, " in text and "; not measured" in text
    assert "device.compute_efficiency" in text
    low, high = result["rows"][0]["step_s_interval"]
    assert low < result["rows"][0]["step_s"] < high


def test_a_profile_that_is_given_wins() -> None:
    result = result_of("strategy=none", "model=lenet", "profile=alexnet_p100")
    assert result["rows"][0]["basis"] == "profile"


def test_a_grid_counts_each_model_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = []
    real = operations.count
    monkeypatch.setattr(operations, "count", lambda *all: counted.append(all) or real(*all))
    source._work.cache_clear()
    grid = ("strategy=none,tree", "world_size=1,2", "batch_size=64,128", "model.hidden=[4],[5]")
    result = result_of(*grid, "model=mlp")
    assert len(result["rows"]) == 16 and len(counted) == 2


def test_a_transform_is_counted_with_its_model() -> None:
    whole, small = (
        result_of(f"strategy={name}", "model=alexnet_small")["profiles"]
        for name in ("overlap", "fc1x1")
    )
    assert sum(small.values()) < 0.3 * sum(whole.values())


def low_bits(*, output_size: int) -> nn.Module:
    return nn.Linear(4, output_size, dtype=torch.bfloat16)


def frozen(*, output_size: int) -> nn.Module:
    return nn.Linear(4, output_size).requires_grad_(False)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((f"model={__name__}.frozen",), "model has no trainable parameters, so there is nothing"),
        (("model=lenet", "hardware=wan100m"), "hardware=wan100m has no device for estimates"),
        (("model=lenet", "precision=bf16"), "precision=bf16: device.peak_flops_per_s of GeForce"),
        (("model=alexnet",), "model=alexnet: images of 32x32 px are too small"),
        (("model=lenet", "data=imagefolder"), "data.path is not set"),
        ((f"model={__name__}.low_bits",), "model: weight is bfloat16; profiles and predictions"),
        (("model=replay",), "profile=none: must be a file in conf/profile"),
        (("model=lenet", "fit=runs/a"), "fit=runs/a: an exchange cannot be fitted if the"),
        (("fit=a.json", "measured=b"), "fit=a.json measured=b: fit= already compares"),
        (("measured=no/such",), "measured=no/such contains no <cell>/record.json"),
    ],
)
def test_refuses_in_one_line(words: tuple[str, ...], message: str) -> None:
    with refusing(message):
        predicted(read(("strategy=none", *words)))


def test_predictions_are_compared_with_measured_cells(tmp_path: Path) -> None:
    words = ["strategy=none", "model=mlp", "batch_size=64", "hardware=this_machine"]
    (row,) = result_of(*words)["rows"]
    settings = resolved(plain(load(words[:2])))
    for repeat, factor in enumerate((0.5, 1.25, 2.0)):
        record = make_record("none", 1, factor * row["step_s"], settings=settings, repeat=repeat)
        leave(tmp_path / str(repeat), record)
    leave(tmp_path / "other", make_record("none", 1, 9.0, settings={**settings, "data.size": 9}))
    out = said(predict.main, *words, f"measured={tmp_path}")
    assert f"compared with 1 measured cell of {tmp_path}: median error 20.0 %, worst 20.0 %" in out
    assert "-20.0" in out


def test_a_written_profile_is_read_and_predicted_as_it_was(tmp_path: Path) -> None:
    profile = Estimate(WORK, "fp32", (2, 8), "mine").profile_of(replace(DEVICE, num_threads=1))
    measured = replace(profile, step_ms=30.0, source="measured: here")
    path = tmp_path / "mine.yaml"
    path.write_text(measured.to_yaml())
    read_again = Profile.parse(OmegaConf.to_container(OmegaConf.load(path)))  # type: ignore[arg-type]
    assert read_again.num_threads == 1 and read_again.step_ms == 30.0
    steps = (simulate(each, FLAT, CEILING, 1, 8).step_s for each in (measured, read_again))
    assert next(steps) == pytest.approx(next(steps), abs=1e-6)
