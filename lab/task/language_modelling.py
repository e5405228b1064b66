"""Language modelling: the next token at each position of a sequence."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from lab.task.base import Task, describe


class LanguageModelling(Task):
    """Cross-entropy of logits [batch, context, vocabulary] with next ids int64 [batch, context].

    Metrics: loss, in nats per token, and perplexity, e to the power of it (Jelinek et al. 1977).
    """

    name = "language_modelling"
    prediction = "token"
    num_sums = 2

    def output_shape(self, targets: Tensor, num_classes: int | None) -> tuple[int, ...]:
        """See Task: (context, vocabulary).

        Raises:
            ValueError: targets are not ids from 0 to num_classes - 1 at each position.
        """
        if num_classes is None or targets.dtype != torch.int64 or targets.ndim != 2:
            raise ValueError(
                f"task={self.name}: needs the next token at each position as target, int64 "
                f"[samples, context], as data=text and data=tokens have it; targets are "
                f"{describe(targets)}"
            )
        smallest, largest = int(targets.min()), int(targets.max())
        if smallest < 0 or largest >= num_classes:
            raise ValueError(
                f"task={self.name}: targets are {describe(targets)} from {smallest} to {largest}; "
                f"token ids must be from 0 to {num_classes - 1}"
            )
        return (targets.shape[1], num_classes)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """See Task."""
        return cross_entropy(outputs.flatten(0, 1), targets.flatten())

    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """See Task: loss, tokens."""
        logits = outputs.flatten(0, 1).float()
        loss = cross_entropy(logits, targets.flatten(), reduction="sum").double()
        return torch.stack([loss, torch.full_like(loss, targets.numel())])

    def metrics(self, sums: Tensor) -> dict[str, float]:
        """See Task."""
        loss = sums[0] / sums[1]
        return {"loss": float(loss), "perplexity": float(loss.exp())}
