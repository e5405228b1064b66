"""The protocol of a task."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

from torch import Tensor


class Task(ABC):
    """The loss and metrics of a model's outputs, given the targets of a batch.

    A sample has one prediction or several: the class of an image; a token at each position of a
    sequence; a value of each pixel. Losses and metrics are means over predictions, never over
    samples or batches.

    Attributes:
        name: the task's choice in the group `task`.
        prediction: name of one prediction, in the singular.
        num_sums: length of `sums`.
        loss: takes outputs [batch, *output_shape] and targets [batch, ...]; returns the mean loss
            of the batch's predictions, float [], for backward.
    """

    name: ClassVar[str]
    prediction: ClassVar[str] = "prediction"
    num_sums: ClassVar[int]
    loss: Callable[[Tensor, Tensor], Tensor]

    @abstractmethod
    def output_shape(self, targets: Tensor, num_classes: int | None) -> tuple[int, ...]:
        """Return a model's output shape for one sample; its last dimension is the output size.

        Args:
            targets: [samples, ...].
            num_classes: targets are indices below it; None: they are not indices.

        Raises: ValueError: the task cannot learn these targets.
        """

    @abstractmethod
    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return sums over a batch's predictions, including their number, float64 [num_sums].

        They add up over batches and ranks, so metrics do not depend on how samples are distributed.
        Arguments are those of `loss`.
        """

    @abstractmethod
    def metrics(self, sums: Tensor) -> dict[str, float]:
        """Return metrics by name, "loss" first, from the total [num_sums] of all `sums`."""

    def _require_indices(self, targets: Tensor, size: int, of: str) -> None:
        """Raise ValueError unless all targets are indices below `size`."""
        smallest, largest = int(targets.min()), int(targets.max())
        if smallest < 0 or largest >= size:
            raise ValueError(
                f"task={self.name}: targets are {describe(targets)} from {smallest} to {largest}; "
                f"{of} must be from 0 to {size - 1}"
            )

    def num_predictions(self, targets: Tensor) -> int:
        """Return the predictions of one sample: one for each value of its target.

        Args: targets: [samples, ...].
        """
        return math.prod(targets.shape[1:])

    def check_outputs(self, outputs: object, shape: tuple[int, ...]) -> None:
        """Refuse a model whose outputs the loss cannot take.

        Args:
            outputs: [batch, ...].
            shape: see `output_shape`.

        Raises: ValueError: the shape differs, or the outputs are not floating-point numbers.
        """
        if not isinstance(outputs, Tensor):
            raise ValueError(
                f"task={self.name}: the model returns type {type(outputs).__name__}; it must "
                "return a tensor; wrap it in a module whose forward returns, for example, .logits"
            )
        if outputs.shape[1:] != shape or not outputs.is_floating_point():
            wanted = ", ".join(map(str, ("batch", *shape)))
            raise ValueError(
                f"task={self.name}: the model's outputs are {describe(outputs)}; with these "
                f"targets they must be floating-point [{wanted}]"
            )


def describe(tensor: Tensor) -> str:
    """Return the dtype and shape of `tensor` as text, such as "float32 [128, 1]"."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
