"""Regression: one or several numbers for each sample."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from lab.task.base import Task, describe


class Regression(Task):
    """Squared error of outputs [batch, k] against targets float32 [batch, k]; [batch] for k = 1.

    Metrics: loss, the mean squared error, and mae, the mean absolute error, in the targets' unit.
    """

    name = "regression"
    num_sums = 3

    def output_shape(self, targets: Tensor, num_classes: int | None) -> tuple[int, ...]:
        """See Task: (k,).

        Raises:
            ValueError: targets are not float32 numbers [samples] or [samples, k].
        """
        if num_classes is not None or targets.dtype != torch.float32 or targets.ndim not in (1, 2):
            raise ValueError(
                f"task={self.name}: targets are {describe(targets)}"
                f"{'' if num_classes is None else f', indices of {num_classes} classes'}; "
                "they must be numbers, float32 [samples] or [samples, k]"
            )
        return tuple(targets.shape[1:]) or (1,)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """See Task."""
        return mse_loss(outputs.view_as(targets), targets)

    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """See Task: squared errors, absolute errors, numbers predicted."""
        errors = outputs.view_as(targets).double() - targets
        squared = errors.square().sum()
        return torch.stack([squared, errors.abs().sum(), torch.full_like(squared, errors.numel())])

    def metrics(self, sums: Tensor) -> dict[str, float]:
        """See Task."""
        squared, absolute, count = map(float, sums)
        return {"loss": squared / count, "mae": absolute / count}
