"""Classification: one of several classes for each sample."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from lab.task.base import Task, describe


class Classification(Task):
    """Cross-entropy of logits [batch, num_classes] with class indices int64 [batch].

    Metrics: loss, and accuracy, the share of samples whose largest logit is their class's.
    """

    name = "classification"
    num_sums = 3

    def output_shape(self, targets: Tensor, num_classes: int | None) -> tuple[int, ...]:
        """See Task: (num_classes,).

        Raises:
            ValueError: targets are not class indices from 0 to num_classes - 1.
        """
        if num_classes is None or targets.dtype != torch.int64 or targets.ndim != 1:
            raise ValueError(
                f"task={self.name}: targets are {describe(targets)}; they must be class indices, "
                "int64 [samples], of data that says how many classes it has"
                f"{_hint(targets, num_classes)}"
            )
        smallest, largest = int(targets.min()), int(targets.max())
        if smallest < 0 or largest >= num_classes:
            raise ValueError(
                f"task={self.name}: targets are {describe(targets)} from {smallest} to {largest}; "
                f"class indices must be from 0 to {num_classes - 1}"
            )
        return (num_classes,)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """See Task."""
        return cross_entropy(outputs, targets)

    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """See Task: loss, samples classified correctly, samples."""
        loss = cross_entropy(outputs.float(), targets, reduction="sum").double()
        correct = (outputs.argmax(dim=1) == targets).sum().double()
        return torch.stack([loss, correct, torch.full_like(loss, targets.numel())])

    def metrics(self, sums: Tensor) -> dict[str, float]:
        """See Task."""
        loss, correct, count = map(float, sums)
        return {"loss": loss / count, "accuracy": correct / count}


def _hint(targets: Tensor, num_classes: int | None) -> str:
    """Lead on to the task that learns indices at each position of a sequence."""
    listed = num_classes is not None and targets.dtype == torch.int64 and targets.ndim == 2
    return "; for a token at each position set task=language_modelling" if listed else ""
