"""Losses and metrics of tasks, and refused targets and outputs; a user's own loss."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.nn.functional import l1_loss

from lab.problem import build_task
from lab.settings.config import ConfigError, build, choices_of, load
from lab.task import axis, heading, metrics_of, shown
from lab.task.base import Task
from lab.task.tasks import Classification, LanguageModelling, OwnLoss, Regression

SAMPLES = 11
CLASSES = 3


def batch(task: Task) -> tuple[Tensor, Tensor]:
    """Return outputs, and targets that fit."""
    torch.manual_seed(0)
    if task.name == "classification":
        return torch.randn(SAMPLES, CLASSES), torch.randint(CLASSES, (SAMPLES,))
    if task.name == "language_modelling":
        return torch.randn(SAMPLES, 4, CLASSES), torch.randint(CLASSES, (SAMPLES, 4))
    return torch.randn(SAMPLES, 2), torch.randn(SAMPLES, 2)


@pytest.fixture(params=choices_of("task"))
def task(request: pytest.FixtureRequest) -> Task:
    made = build(load([f"task={request.param}"]).task)
    assert isinstance(made, Task) and made.name == request.param
    return made


@pytest.mark.parametrize("parts", [(11,), (5, 5, 1), (1, 3, 7)])
def test_metrics_do_not_depend_on_how_samples_are_shared_out(
    task: Task, parts: tuple[int, ...]
) -> None:
    outputs, targets = batch(task)
    shares = zip(outputs.split(list(parts)), targets.split(list(parts)), strict=True)
    sums = torch.stack([task.sums(*share) for share in shares])
    assert sums.shape == (len(parts), task.num_sums) and sums.dtype == torch.float64
    metrics, whole = task.metrics(sums.sum(dim=0)), task.metrics(task.sums(outputs, targets))
    assert metrics == pytest.approx(whole, rel=1e-6) and next(iter(metrics)) == "loss"


def test_the_metric_loss_is_the_loss_that_is_trained_on(task: Task) -> None:
    outputs, targets = batch(task)
    loss = task.metrics(task.sums(outputs, targets))["loss"]
    assert loss == pytest.approx(float(task.loss(outputs, targets)), rel=1e-6)


def test_predictions_of_a_sample_are_those_that_the_sums_count(task: Task) -> None:
    outputs, targets = batch(task)
    each = {"classification": 1, "language_modelling": 4, "regression": 2}[task.name]
    assert task.num_predictions(targets) == each
    assert task.sums(outputs, targets)[-1] == SAMPLES * each


def test_accuracy_counts_largest_logits() -> None:
    logits = torch.eye(3)
    metrics = Classification().metrics(Classification().sums(logits, torch.tensor([0, 1, 0])))
    assert metrics["accuracy"] == pytest.approx(2 / 3)
    assert metrics["loss"] == pytest.approx(math.log(math.e + 2) - 2 / 3)


def test_regression_takes_one_number_with_or_without_a_dimension_for_it() -> None:
    task, outputs = Regression(), torch.tensor([[1.0], [4.0]])
    for targets in (torch.tensor([2.0, 1.0]), torch.tensor([[2.0], [1.0]])):
        assert task.output_shape(targets, None) == (1,)
        assert float(task.loss(outputs, targets)) == 5.0
        assert task.metrics(task.sums(outputs, targets)) == {"loss": 5.0, "mae": 2.0}


def test_a_model_that_knows_nothing_has_the_perplexity_of_the_vocabulary() -> None:
    task, targets = LanguageModelling(), torch.randint(50, (2, 7))
    assert task.output_shape(targets, 50) == (7, 50)
    metrics = task.metrics(task.sums(torch.zeros(2, 7, 50), targets))
    assert metrics == pytest.approx({"loss": math.log(50), "perplexity": 50})


def test_each_position_is_scored_with_its_own_target() -> None:
    targets = torch.tensor([[0, 1], [2, 0]])
    sure = 9 * torch.nn.functional.one_hot(targets, 3).float()
    right, shifted = (LanguageModelling().loss(sure, t) for t in (targets, targets.roll(1, 1)))
    assert right < 0.001 and shifted > 8


def test_the_perplexity_of_a_model_that_has_diverged_is_infinite() -> None:
    sums = torch.tensor([1e5, 10.0], dtype=torch.float64)
    assert LanguageModelling().metrics(sums) == {"loss": 1e4, "perplexity": math.inf}


@pytest.mark.parametrize(
    ("task", "targets", "num_classes", "message"),
    [
        (Classification(), torch.zeros(4), 3, "targets are float32 [4]; they must be class ind"),
        (Classification(), torch.zeros(4), None, "targets are float32 [4]; they must be class"),
        (Classification(), torch.zeros(4).long(), None, "int64 [4]; they must be class indices"),
        (Classification(), torch.zeros(4, 1).long(), 3, "targets are int64 [4, 1]; they must be"),
        (Classification(), torch.zeros(4).int(), 3, "targets are int32 [4]; they must be class"),
        (Classification(), torch.tensor([0, 3]), 3, "int64 [2] from 0 to 3; class indices must be"),
        (Classification(), torch.tensor([-1, 2]), 3, "from -1 to 2; class indices must be from 0"),
        (Classification(), torch.zeros(4, 5).long(), 3, "set task=language_modelling"),
        (LanguageModelling(), torch.tensor([[0, 3]]), 3, "0 to 3; token ids must be from 0 to 2"),
        (LanguageModelling(), torch.tensor([[-1, 2]]), 3, "from -1 to 2; token ids must be from"),
        (Regression(), torch.zeros(4).long(), 3, "int64 [4], indices of 3 classes; they must be"),
        (Regression(), torch.zeros(4).long(), None, "int64 [4]; they must be numbers, float32"),
        (Regression(), torch.zeros(4).double(), None, "float64 [4]; they must be numbers, float32"),
        (Regression(), torch.zeros(4, 2, 2), None, "float32 [4, 2, 2]; they must be numbers"),
    ],
)
def test_targets_that_do_not_fit_are_refused(
    task: Task, targets: Tensor, num_classes: int | None, message: str
) -> None:
    with pytest.raises(ValueError) as caught:
        task.output_shape(targets, num_classes)
    line = str(caught.value)
    assert line.startswith(f"task={task.name}: targets are ") and message in line
    assert "\n" not in line


@pytest.mark.parametrize(
    ("targets", "vocabulary", "found"),
    [
        (torch.zeros(4).long(), 10, "int64 [4]"),
        (torch.zeros(4, 5).long(), None, "int64 [4, 5]"),
        (torch.zeros(4, 5), 10, "float32 [4, 5]"),
        (torch.zeros(4, 5, 6).long(), 10, "int64 [4, 5, 6]"),
    ],
)
def test_a_language_model_needs_tokens_as_targets(
    targets: Tensor, vocabulary: int | None, found: str
) -> None:
    with pytest.raises(ValueError) as caught:
        LanguageModelling().output_shape(targets, vocabulary)
    assert str(caught.value) == (
        "task=language_modelling: needs the next token at each position as the target, int64 "
        f"[samples, context], as in data=text and data=tokens; these targets are {found}"
    )


@pytest.mark.parametrize(
    "outputs", [torch.zeros(1, 4), torch.zeros(1, 3, 1), torch.zeros(1, 3).long()]
)
def test_outputs_that_do_not_fit_are_refused(outputs: Tensor) -> None:
    with pytest.raises(ValueError, match=r"must be floating-point \[batch, 3\]"):
        Classification().check_outputs(outputs, (3,))
    Classification().check_outputs(torch.zeros(1, 3), (3,))


def test_an_evaluation_is_metrics_and_when_it_was() -> None:
    evaluation = {"step": 3, "seconds": 0.1, "loss": 2.0, "accuracy": 0.5}
    assert metrics_of(evaluation) == {"loss": 2.0, "accuracy": 0.5}
    assert (shown("accuracy", 0.96944), shown("mae", 0.0669912)) == ("96.94 %", "0.06699")
    assert (shown("perplexity", 50257.0), heading("perplexity")) == ("50257.00", ("perplexity", 1))
    assert (axis("accuracy"), axis("mae")) == (("test accuracy (%)", 100.0), ("test mae", 1.0))


def test_its_metric_is_the_mean_over_samples_of_all_batches() -> None:
    task = OwnLoss("mine.l1", l1_loss)
    outputs, targets = torch.rand(7, 2), torch.rand(7, 2)
    sums = sum(task.sums(outputs[part], targets[part]) for part in (slice(0, 5), slice(5, 7)))
    assert isinstance(sums, Tensor)
    assert task.metrics(sums)["loss"] == pytest.approx(float(l1_loss(outputs, targets)))


def test_a_loss_that_is_no_number_is_refused_by_one_line() -> None:
    task = OwnLoss("mine.each", lambda outputs, targets: (outputs - targets).abs())
    with pytest.raises(ValueError, match=r"^task=mine.each: returned float32 \[3\]; it must"):
        task.loss(torch.rand(3), torch.rand(3))


def test_a_loss_that_is_a_sum_over_samples_is_refused(task: Task) -> None:
    outputs, targets = (part[:1] for part in batch(task))
    task.require_mean(outputs, targets)
    line = r"^task=mine.total: its loss is a sum over the samples .*; it must be their mean$"
    with pytest.raises(ValueError, match=line):
        OwnLoss("mine.total", lambda o, t: SAMPLES * len(o) * task.loss(o, t)).require_mean(
            outputs, targets
        )
    needs_two = OwnLoss("mine.pairs", lambda o, t: task.loss(o, t) / (len(o) - 1))
    needs_two.require_mean(outputs, targets)


class Own(Regression):
    """A task of the user's, whose metrics and sums are given."""

    def __init__(self, metrics: Any = None, sums: Any = None) -> None:
        self.given, self.own_sums = metrics, sums

    def metrics(self, sums: Tensor) -> Any:
        return self.given

    def sums(self, outputs: Tensor, targets: Tensor) -> Any:
        return self.own_sums


def test_metrics_of_a_users_task_become_pythons_numbers() -> None:
    own = Own({"loss": torch.tensor(0.5), "r2": np.float32(0.25), "right": True, "odd": math.nan})
    found = own.evaluation(torch.zeros(3))
    assert {name: type(value) for name, value in found.items()} == dict.fromkeys(found, float)
    assert (found["loss"], found["r2"], found["right"]) == (0.5, 0.25, 1.0)


@pytest.mark.parametrize(
    ("metrics", "found"),
    [
        (0.5, "0.5"),
        ({"mse": 0.5}, "{'mse': 0.5}"),
        ({"loss": 0.5, "verdict": "good"}, "'verdict': 'good'"),
        ({"loss": 0.5, "each": torch.zeros(2)}, r"'each': tensor\(\[0., 0.\]\)"),
        ({"loss": None}, "'loss': None"),
        ({"loss": 0.5, 5: 1.0}, "5: 1.0"),
        ({"loss": 0.5, "step": 1.0}, "'step': 1.0"),  # of an evaluation
    ],
)
def test_metrics_that_no_record_holds_are_refused(metrics: Any, found: str) -> None:
    with pytest.raises(ValueError, match=f"^task=regression: metrics returns {found}; it must"):
        Own(metrics).evaluation(torch.zeros(3))


@pytest.mark.parametrize(
    ("sums", "found"),
    [
        (torch.tensor(1.0), r"float32 \[\]"),  # which would be added to each of them
        (torch.zeros(2), r"float32 \[2\]"),
        ([0.0, 0.0, 0.0], "type list"),
    ],
)
def test_sums_that_do_not_add_up_are_refused(sums: Any, found: str) -> None:
    line = rf"^task=regression: sums returns {found}; it must return a tensor \[3\]"
    with pytest.raises(ValueError, match=line):
        Own(sums=sums).checked_sums(torch.zeros(1), torch.zeros(1))


class Nameless(Task):
    """A task of the user's that lacks what its class must set."""

    num_sums = 1

    def output_shape(self, targets: Tensor, num_classes: int | None) -> tuple[int, ...]:
        return ()

    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs

    def metrics(self, sums: Tensor) -> dict[str, float]:
        return {}


class Learned(nn.Module):
    """A loss with a weight of its own."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()), requires_grad=not frozen)

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.scale * l1_loss(outputs, targets)


def test_a_loss_whose_weights_nobody_would_train_is_refused() -> None:
    target = f"{__name__}.Learned"
    with pytest.raises(ConfigError, match=rf"^task={target}: has parameters .* \(scale\); make"):
        build_task(OmegaConf.create({"_target_": target, "frozen": False}))
    assert isinstance(build_task(OmegaConf.create({"_target_": target, "frozen": True})), OwnLoss)


def test_what_a_task_lacks_is_named() -> None:
    target = f"{__name__}.Nameless"
    with pytest.raises(ConfigError, match=f"^task={target}: its class must set name, loss$"):
        build_task(OmegaConf.create({"_target_": target}))


@pytest.mark.parametrize(
    ("targets", "num_classes", "shape"),
    [
        (torch.zeros(4, dtype=torch.int64), 10, (10,)),
        (torch.zeros(4, 6, dtype=torch.int64), 10, (6, 10)),
        (torch.zeros(4, 3), None, (3,)),
        (torch.zeros(4), None, (1,)),
    ],
)
def test_the_size_of_outputs_follows_from_the_targets(
    targets: Tensor, num_classes: int | None, shape: tuple[int, ...]
) -> None:
    assert OwnLoss("mine", l1_loss).output_shape(targets, num_classes) == shape


@pytest.mark.parametrize(
    ("targets", "each"),
    [
        (torch.zeros(4, dtype=torch.int64), 1),
        (torch.zeros(4, 6, dtype=torch.int64), 6),
        (torch.zeros(4, 32, 32, dtype=torch.int64), 1024),  # a class for each pixel
        (torch.zeros(4, 32, 32), 1024),  # a mask
        (torch.zeros(4, 1, 32, 32), 1024),
        (torch.zeros(4, 3), 3),
        (torch.zeros(4), 1),
    ],
)
def test_each_value_of_a_target_is_a_prediction(targets: Tensor, each: int) -> None:
    assert OwnLoss("mine", l1_loss).num_predictions(targets) == each
