"""A user's own loss as a task."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lab.task.base import Task


class OwnLoss(Task):
    """A loss function of the user's, the mean over the samples of a batch.

    Metrics: loss, averaged over samples.

    Args:
        name: the path of the function.
        function: takes outputs and targets of a batch, and returns their mean loss, float [].
    """

    num_sums = 2

    def __init__(self, name: str, function: Callable[[Tensor, Tensor], object]) -> None:
        self.name = name  # type: ignore[misc]  # the class has none: each loss has its own
        self._function = function

    def output_shape(self, targets: Tensor, num_classes: int | None) -> tuple[int, ...]:
        """See Task: scores of the classes if targets are indices, else the shape of a target."""
        shape = tuple(targets.shape[1:])
        return (*shape, num_classes) if num_classes is not None else shape or (1,)

    def check_outputs(self, outputs: object, shape: tuple[int, ...]) -> None:
        """Accept all outputs: only the function knows which it takes."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """See Task.

        Raises:
            ValueError: the function returned something else than one number.
        """
        loss = self._function(outputs, targets)
        if not isinstance(loss, Tensor) or loss.ndim:
            found = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"task={self.name}: returned {found}; a loss is one number, a mean")
        return loss

    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """See Task: loss, samples."""
        loss = self.loss(outputs, targets).double() * len(targets)
        return torch.stack([loss, torch.full_like(loss, len(targets))])

    def metrics(self, sums: Tensor) -> dict[str, float]:
        """See Task."""
        loss, count = map(float, sums)
        return {"loss": loss / count}
