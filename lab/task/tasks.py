"""The lab's tasks, and a user's own loss as one. Methods are described by `Task`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, mse_loss

from lab.task.base import Task, describe


class Classification(Task):
    """Cross-entropy of logits [batch, num_classes] with class indices int64 [batch].

    Metrics: loss, and accuracy, the share of samples whose largest logit is their class's.
    """

    name = "classification"
    num_sums = 3
    loss = staticmethod(cross_entropy)

    def output_shape(self, targets: Tensor, num_classes: int | None) -> tuple[int, ...]:
        if num_classes is None or targets.dtype != torch.int64 or targets.ndim != 1:
            listed = num_classes is not None and targets.dtype == torch.int64 and targets.ndim == 2
            hint = "; for a token at each position, set task=language_modelling" if listed else ""
            raise ValueError(
                f"task={self.name}: targets are {describe(targets)}; they must be class indices, "
                f"int64 [samples], of data with a known number of classes{hint}"
            )
        self._require_indices(targets, num_classes, "class indices")
        return (num_classes,)

    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Loss, samples classified correctly, samples."""
        loss = cross_entropy(outputs.float(), targets, reduction="sum").double()
        correct = (outputs.argmax(dim=1) == targets).sum().double()
        return torch.stack([loss, correct, torch.full_like(loss, targets.numel())])

    def metrics(self, sums: Tensor) -> dict[str, float]:
        loss, correct, count = map(float, sums)
        return {"loss": loss / count, "accuracy": correct / count}


class LanguageModelling(Task):
    """Cross-entropy of logits [batch, context, vocabulary] with next ids int64 [batch, context].

    Metrics: loss, in nats per token, and perplexity, e to the power of it (Jelinek et al. 1977).
    """

    name = "language_modelling"
    prediction = "token"
    num_sums = 2

    def output_shape(self, targets: Tensor, num_classes: int | None) -> tuple[int, ...]:
        if num_classes is None or targets.dtype != torch.int64 or targets.ndim != 2:
            raise ValueError(
                f"task={self.name}: needs the next token at each position as the target, int64 "
                f"[samples, context], as in data=text and data=tokens; these targets are "
                f"{describe(targets)}"
            )
        self._require_indices(targets, num_classes, "token ids")
        return (targets.shape[1], num_classes)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(outputs.flatten(0, 1), targets.flatten())

    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Loss, tokens."""
        logits = outputs.flatten(0, 1).float()
        loss = cross_entropy(logits, targets.flatten(), reduction="sum").double()
        return torch.stack([loss, torch.full_like(loss, targets.numel())])

    def metrics(self, sums: Tensor) -> dict[str, float]:
        loss = sums[0] / sums[1]
        return {"loss": float(loss), "perplexity": float(loss.exp())}


class Regression(Task):
    """Squared error of outputs [batch, k] against targets float32 [batch, k]; [batch] for k = 1.

    Metrics: loss, the mean squared error, and mae, the mean absolute error, in the targets' unit.
    """

    name = "regression"
    num_sums = 3

    def output_shape(self, targets: Tensor, num_classes: int | None) -> tuple[int, ...]:
        if num_classes is not None or targets.dtype != torch.float32 or targets.ndim not in (1, 2):
            raise ValueError(
                f"task={self.name}: targets are {describe(targets)}"
                f"{'' if num_classes is None else f', indices of {num_classes} classes'}; "
                "they must be numbers, float32 [samples] or [samples, k]"
            )
        return tuple(targets.shape[1:]) or (1,)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return mse_loss(outputs.view_as(targets), targets)

    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Squared errors, absolute errors, numbers predicted."""
        errors = outputs.view_as(targets).double() - targets
        squared = errors.square().sum()
        return torch.stack([squared, errors.abs().sum(), torch.full_like(squared, errors.numel())])

    def metrics(self, sums: Tensor) -> dict[str, float]:
        squared, absolute, count = map(float, sums)
        return {"loss": squared / count, "mae": absolute / count}


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
        """Scores of the classes if targets are indices, else the shape of a target."""
        shape = tuple(targets.shape[1:])
        return (*shape, num_classes) if num_classes is not None else shape or (1,)

    def check_outputs(self, outputs: object, shape: tuple[int, ...]) -> None:
        """Accept all outputs: only the function knows which it takes."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Raises ValueError: the function returned something else than one number."""
        loss = self._function(outputs, targets)
        if not isinstance(loss, Tensor) or loss.ndim or loss.is_complex():
            found = describe(loss) if isinstance(loss, Tensor) else f"type {type(loss).__name__}"
            raise ValueError(
                f"task={self.name}: returned {found}; it must return one number, the mean loss, as "
                "a tensor"
            )
        return loss

    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Loss, samples."""
        loss = self.loss(outputs, targets).double() * len(targets)
        return torch.stack([loss, torch.full_like(loss, len(targets))])

    def metrics(self, sums: Tensor) -> dict[str, float]:
        loss, count = map(float, sums)
        return {"loss": loss / count}
