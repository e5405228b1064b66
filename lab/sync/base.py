"""Sync: what the trainer asks for beside the exchange of gradients."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn

from lab.measure.clock import Clock


class Sync:
    """The face of a sync that exchanges gradients in every step, which leaves nothing to do here.

    Attributes:
        module: what runs forward.
        every: steps from one exchange to the next.
        own_replicas: between exchanges each rank has weights and momentum of its own.
        needs_like_gpus: see Exchange; of what is exchanged by other means than one of these.
        loss_scale: of fp16; gradients are divided by it before they are exchanged.
        clock: notes when exchanges run, where anyone wants to know.
    """

    module: nn.Module
    every = 1
    own_replicas = False
    needs_like_gpus = False
    loss_scale = 1.0
    clock: Clock | None = None

    @property
    def loss_factor(self) -> float:
        """What the loss is multiplied by before backward."""
        return self.loss_scale

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def unscale(self) -> None:
        """Take the loss scale off all gradients at once, where no bucket does."""
        if self.loss_scale != 1.0:
            gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
            torch._foreach_div_(gradients, self.loss_scale)

    def after_update(self, last: bool) -> Tensor | None:
        """Exchange what is to be exchanged once the optimizer has updated the weights.

        Args:
            last: this was the run's last step.

        Returns:
            Whether all values were finite, bool [], the same on all ranks; None if nobody looked.
        """
        return None

    def settle(self) -> None:
        """Wait for exchanges that outlast their step, so that ranks may talk of something else."""

    def state_dict(self) -> dict[str, Any]:
        """What all ranks alike must remember between steps: tensors, keyed by parameter name."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned; {} where another sync was at work."""
