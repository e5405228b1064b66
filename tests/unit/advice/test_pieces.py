"""Parts of advice: targets, what can be told apart, limits, memory, known accuracies."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest

from lab.advice.advise import (
    CODECS,
    FEEDBACK,
    MODEL_ERROR,
    ROUNDS,
    TRIALS,
    Forecast,
    contenders,
    limit,
    ranked,
)
from lab.advice.request import Target
from lab.claims.predicted import profile_of
from lab.exchange.cost import Sizes
from lab.settings.config import choices_of, load
from lab.simulate.hardware import Link
from lab.simulate.predict import plain
from lab.simulate.strategy import rank_bytes, sync_bytes
from tests.conftest import ROOT
from tests.support.simulated import FLAT, strategy

PROFILE = replace(profile_of("alexnet_titanx"), bytes_scale=0.02)


def forecast(name: str, *steps_s: float, weight: float = 1, batch_size: int = 100) -> Forecast:
    return Forecast(name, False, batch_size, weight, steps_s)


def test_only_a_price_makes_seconds_of_more_devices_dearer() -> None:
    per_node = Target("cost", price_per_hour=2.0, unit="node")
    assert [per_node.weight(size, 4) for size in (1, 4, 5)] == [1, 1, 2]
    assert Target("cost", price_per_hour=2.0).weight(5, 4) == 5
    assert Target("hours").weight(5, 4) == Target().weight(5, 4) == 1


def test_a_training_is_as_long_as_its_steps_or_its_epochs() -> None:
    target = Target(samples=1000)
    assert target.total_samples(epochs=3, steps=None, batch_size=10) == 3000
    assert target.total_samples(epochs=None, steps=20, batch_size=10) == 200
    assert Target().total_samples(epochs=3, steps=None, batch_size=10) is None
    assert target.hours(0.01, 3600) == pytest.approx(0.01)


def test_options_are_ranked_by_weighted_time_of_a_sample() -> None:
    fast, cheap = forecast("fast", 1.0, weight=4), forecast("cheap", 2.0, weight=1)
    large = forecast("large", 3.0, batch_size=1000)
    assert [each.name for each in ranked([fast, cheap, large])] == ["large", "cheap", "fast"]


def test_options_are_told_apart_on_every_machine_that_they_may_meet() -> None:
    first = forecast("first", 1.0, 1.0, 3.0)
    always = forecast("always slower", 1.2, 1.1, 3.2)  # though slower than its longest step
    sometimes = forecast("sometimes faster", 1.2, 0.9, 3.2)
    barely = forecast("barely slower", 1 + MODEL_ERROR / 2, 1.1, 3.1)
    close = contenders([first, barely, always, sometimes])
    assert [each.name for each in close] == ["barely slower", "sometimes faster"]


SLOW = replace(FLAT, inter=Link(0.0, 1e7))


@pytest.mark.parametrize(
    ("hardware", "name", "expected"),
    [
        (replace(FLAT, inter=Link(0.0, 1e12)), "tree", "compute"),
        (SLOW, "tree", "bandwidth"),
        (SLOW, "overlap", "bandwidth"),
        (replace(FLAT, inter=Link(0.5, 1e12)), "tree", "latency"),
        (replace(FLAT, codec_bytes_per_s=1e7), "onebit", "codec"),
        (replace(FLAT, overhead_s=10.0), "tree", "host"),
        (replace(FLAT, num_slow=1, slow_factor=9.0), "tree", "compute"),
    ],
)
def test_the_dearest_resource_limits(hardware: object, name: str, expected: str) -> None:
    found, share = limit(PROFILE, hardware, strategy(name), 4, 32)  # type: ignore[arg-type]
    assert found == expected
    assert 0.3 < share <= 1


def test_links_of_different_rates_limit_too() -> None:
    uneven = replace(FLAT, node_rates=(1e9, 1e9, 1e6, 1e9))
    found, share = limit(PROFILE, uneven, strategy("tree"), 4, 32)
    assert found == "bandwidth" and share > 0.9


def bytes_of(name: str, *settings: str, size: int = 2) -> float:
    """Return the bytes of a rank in copies of the model."""
    composed = plain(load([f"strategy={name}", *settings]))
    total = rank_bytes(PROFILE, strategy(name, *settings), composed, size, FLAT)
    return total / PROFILE.gradient_bytes


def test_memory_counts_copies_of_the_model() -> None:
    # Weights, gradients, momentum, and the one bucket into which they are gathered.
    assert bytes_of("allreduce") == pytest.approx(4)
    assert bytes_of("allreduce", "optim.momentum=0") == pytest.approx(3)
    assert bytes_of("allreduce", "optim=torch.optim.Adam", "+optim.amsgrad=true") == pytest.approx(
        6
    )
    assert bytes_of("local_sgd") == pytest.approx(5)  # and the anchor
    assert bytes_of("diloco") == pytest.approx(6)  # and the outer momentum
    assert bytes_of("caffe") == pytest.approx(4)  # the root holds momentum
    # Both residuals, the second of half the rows, and messages of a thirty-second.
    assert bytes_of("onebit", "bucket_mb=null") == pytest.approx(4 + 1.5 + 3.5 / 32, rel=0.01)


@pytest.mark.parametrize(
    "sync", [{"_target_": "mine.Sync"}, {"_target_": "lab.DDPSync", "hook": "x"}]
)
def test_memory_of_an_unknown_sync_is_unknown(sync: dict[str, str]) -> None:
    assert math.isnan(sync_bytes(Sizes(8, 8, 8, 0, 2), {"sync": sync, "exchange": {}}))


def test_accuracies_are_of_lossy_strategies() -> None:
    known = choices_of("strategy")
    assert all(name in known and strategy(name).lossy for name in TRIALS)


def cells(path: str, line: str) -> list[str]:
    """Return the cells that follow in the one line of a table that begins so."""
    (found,) = re.findall(rf"^\| {re.escape(line)} (.*) \|$", (ROOT / path).read_text(), re.M)
    return [cell.strip() for cell in found.strip("| ").split("|")]


def test_accuracies_are_those_that_the_documents_record() -> None:
    names = ["allreduce", "fp16", "int8", "signsgd_ef", "topk", "randomk", "powersgd"]
    for model in ("MLP", "LeNet"):
        recorded = dict(
            zip(names, cells("docs/exchanges/compression.md", f"{model} |"), strict=True)
        )
        for name, trials in TRIALS.items():
            for trial in trials:
                if (trial.source, trial.model) == (CODECS, model):
                    assert float(recorded[name]) == trial.percent
                    assert float(recorded["allreduce"]) == trial.reference
    for model, line in (("LeNet", "LeNet, 337 steps |"), ("MLP", "`model=mlp optim.lr=0.02")):
        reference, local, outer = [
            float(x) for x in cells("docs/exchanges/schedules.md", line)[-7:][:3]
        ]
        for name, percent in (("local_sgd", local), ("diloco", outer)):
            (trial,) = (t for t in TRIALS[name] if t.model == model)
            assert (trial.percent, trial.reference, trial.source) == (percent, reference, ROUNDS)
    (trial,) = TRIALS["onebit"]
    assert trial.percent == float(cells("docs/results/README.md", "`onebit` | 96.67 96.67")[-1])
    reference = cells("docs/results/README.md", "`allreduce` | 96.67 96.67")[-1]
    assert (trial.reference, trial.source) == (float(reference), FEEDBACK)
