"""A model's layers: the modules that have parameters of their own, by name."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


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
