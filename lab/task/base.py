"""The protocol of a task."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from numbers import Real
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from lab.task import WHEN


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

    def require_mean(self, outputs: Tensor, targets: Tensor) -> None:
        """Refuse a loss that is a sum over samples: ranks would train with another learning rate.

        Args: outputs, targets: of one sample.

        Raises: ValueError: for the same sample twice, the loss is twice as large.
        """
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):  # pyright: ignore
                once = float(self.loss(outputs, targets))
                twice = float(self.loss(torch.cat(2 * [outputs]), torch.cat(2 * [targets])))
        except Exception:  # of the user's function, which may need more samples: training tells
            return
        if once and math.isclose(twice, 2 * once, rel_tol=1e-5):
            raise ValueError(
                f"task={self.name}: its loss is a sum over the samples of a batch (one sample "
                f"gives {once:.4g}, the same one twice {twice:.4g}); it must be their mean"
            )

    def checked_sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return `sums` of a batch.

        Raises: ValueError: a user's has another shape, so that it would not add up.
        """
        sums = cast(object, self.sums(outputs, targets))
        if not isinstance(sums, Tensor) or sums.shape != (self.num_sums,):
            found = describe(sums) if isinstance(sums, Tensor) else f"type {type(sums).__name__}"
            raise ValueError(
                f"task={self.name}: sums returns {found}; it must return a tensor "
                f"[{self.num_sums}], as num_sums says"
            )
        return sums

    def evaluation(self, sums: Tensor) -> dict[str, float]:
        """Return `metrics` of the total of all sums, as Python's numbers.

        Raises: ValueError: a user's are not numbers by name, or the loss is not among them.
        """
        found = cast(object, self.metrics(sums))
        metrics = cast(dict[object, Any], found) if isinstance(found, dict) else {}
        wrong = [
            name
            for name, value in metrics.items()
            if not isinstance(name, str) or name in WHEN or not _is_number(value)
        ]
        if wrong or "loss" not in metrics:
            what = f"{wrong[0]!r}: {metrics[wrong[0]]!r:.80}" if wrong else f"{found!r:.80}"
            raise ValueError(
                f"task={self.name}: metrics returns {what}; it must return a dict of numbers by "
                f"name, with 'loss' and without {' and '.join(map(repr, WHEN))}"
            )
        return {str(name): float(value) for name, value in metrics.items()}

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


def _is_number(value: object) -> bool:
    if isinstance(value, Tensor):
        return not value.ndim and not value.is_complex()
    return isinstance(value, Real)


def describe(tensor: Tensor) -> str:
    """Return the dtype and shape of `tensor` as text, such as "float32 [128, 1]"."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
