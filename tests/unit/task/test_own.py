"""A user's loss as a task."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import l1_loss

from lab.task.tasks import OwnLoss


def test_its_metric_is_the_mean_over_samples_of_all_batches() -> None:
    task = OwnLoss("mine.l1", l1_loss)
    outputs, targets = torch.rand(7, 2), torch.rand(7, 2)
    sums = sum(task.sums(outputs[part], targets[part]) for part in (slice(0, 5), slice(5, 7)))
    assert isinstance(sums, Tensor)
    assert task.metrics(sums)["loss"] == pytest.approx(float(l1_loss(outputs, targets)))


def test_a_loss_that_is_no_number_is_refused_by_one_line() -> None:
    task = OwnLoss("mine.each", lambda outputs, targets: (outputs - targets).abs())
    with pytest.raises(ValueError, match=r"^task=mine.each: returned \[3\]; a loss is one number"):
        task.loss(torch.rand(3), torch.rand(3))


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
