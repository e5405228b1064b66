"""Marks of a model's layers, by hooks during training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lab.measure.marks import Mark, mark


@dataclass
class Pass:
    """Marks of one forward and backward.

    Attributes:
        forward: layers with their begin, in order.
        middle: end of the model's forward.
        backward: layers with the moments when their gradients were ready.
    """

    begin: Mark
    forward: list[tuple[str, Mark]] = field(default_factory=list[tuple[str, Mark]])
    middle: Mark | None = None
    backward: list[tuple[str, Mark]] = field(default_factory=list[tuple[str, Mark]])

    def spans(self) -> Iterator[tuple[str, str, Mark, Mark]]:
        """Yield pass, layer, begin and end.

        In forward a layer lasts until the next one begins, so it includes the activations and
        pooling after it. In backward it lasts from the last gradient of the layer above to its
        own; the last layer includes the loss.
        """
        assert self.middle is not None
        ends = [*(begin for _, begin in self.forward[1:]), self.middle]
        begins = [self.begin, *ends]
        for (name, _), begin, end in zip(self.forward, begins, ends, strict=False):
            yield "forward", name, begin, end
        before = self.middle
        for name, ready in self.backward:
            yield "backward", name, before, ready
            before = ready


class LayerMarks:
    """Hooks that mark the layers of a model, that is each module with its own parameters.

    Attributes:
        passes: where marks go; whoever empties it may put another list in its place.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.passes: list[Pass] = []

    @contextmanager
    def on(self, model: nn.Module) -> Iterator[None]:
        """Mark every pass of a model while the context lasts."""
        layers = layers_of(model)
        hooks = [model.register_forward_pre_hook(self._begin)]
        for name, module in layers.items():
            hooks.append(module.register_forward_pre_hook(self._forward(name)))
        for parameter, name in owners_of(layers).items():
            hooks.append(parameter.register_post_accumulate_grad_hook(self._backward(name)))
        hooks.append(model.register_forward_hook(self._turn))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _begin(self, *_: Any) -> None:
        self.passes.append(Pass(mark(self._device)))

    def _turn(self, *_: Any) -> None:
        self.passes[-1].middle = mark(self._device)

    def _forward(self, name: str) -> Callable[..., None]:
        def note(*_: Any) -> None:
            if self.passes[-1].middle is None:  # else backward computes the layer again
                self.passes[-1].forward.append((name, mark(self._device)))

        return note

    def _backward(self, name: str) -> Callable[..., None]:
        def note(*_: Any) -> None:
            self.passes[-1].backward.append((name, mark(self._device)))

        return note


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules with parameters of their own, by name, in the order of registration."""
    return {
        name.replace(".", "_") or "model": module
        for name, module in model.named_modules()
        if any(True for _ in module.parameters(recurse=False))
    }


def owners_of(layers: dict[str, nn.Module]) -> dict[nn.Parameter, str]:
    """Return the layer of each parameter that is trained; a shared one belongs to its first."""
    owners: dict[nn.Parameter, str] = {}
    for name, module in layers.items():
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad:
                owners.setdefault(parameter, name)
    return owners


def sizes_of(layers: dict[str, nn.Module]) -> dict[str, int]:
    """Return the number of values of each layer's gradient."""
    sizes = dict.fromkeys(layers, 0)
    for parameter, name in owners_of(layers).items():
        sizes[name] += parameter.numel()
    return sizes


def in_order(called: Iterable[str], registered: Iterable[str]) -> list[str]:
    """Return all layers in the order of their first call.

    A layer that is never called, because another module uses its parameters, follows the one that
    is registered before it.
    """
    order = list(dict.fromkeys(called))
    before: str | None = None
    for name in registered:
        if name not in order:
            order.insert(order.index(before) + 1 if before else 0, name)
        before = name
    return order
