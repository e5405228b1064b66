"""Mark when a model's last gradient is ready, where a library waits for other ranks after it."""

from __future__ import annotations

from functools import partial
from typing import cast

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lab.measure.clock import Clock


def waits_of_ddp(model: nn.Module) -> tuple[str, ...]:
    """Return the phases in which DDP waits: before forward it sends buffers, as running means."""
    return ("backward", "forward") if any(True for _ in model.buffers()) else ("backward",)


class LastGradient:
    """A hook on the parameter whose gradient came last in the first step; all count as one bucket.

    DDP's own hook runs after it, and DDP waits when backward ends. Each hook costs a microsecond,
    so the others are removed after the first step, which marks nothing.
    """

    def __init__(self, model: nn.Module) -> None:
        self.clock: Clock | None = None
        self._hooks: dict[str, RemovableHandle] = {}  # in the order in which gradients came
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                register = parameter.register_post_accumulate_grad_hook  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
                self._hooks[name] = cast(RemovableHandle, register(partial(self._ready, name)))

    def end_step(self) -> None:
        """Keep the hook of the last gradient alone."""
        while len(self._hooks) > 1:
            self._hooks.pop(next(iter(self._hooks))).remove()

    def close(self) -> None:
        """Remove all hooks."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()

    def _ready(self, name: str, _parameter: Tensor) -> None:
        if len(self._hooks) > 1:
            self._hooks[name] = self._hooks.pop(name)
        elif self.clock:
            self.clock.ready(0, latest=True)  # micro-batches: the last one's counts
